#include "train/sampling/generator.hpp"

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {

std::string_view name_of(Finish finish) noexcept {
  switch (finish) {
    case Finish::length:
      return "length";
    case Finish::end_token:
      return "end token";
    case Finish::stop:
      return "stop";
    case Finish::positions:
      break;
  }
  return "positions";
}

Generator::Generator(LoadedModel& model, const RunShape& shape, std::int64_t vocabulary)
    : model_(model),
      shape_(shape),
      vocabulary_(static_cast<std::size_t>(vocabulary)),
      logits_(static_cast<std::size_t>(shape.batch) * vocabulary_) {}

Generator::Sequence Generator::sequence_of(std::span<const std::int32_t> prompt, std::size_t index) const {
  if (prompt.empty() || std::ssize(prompt) > shape_.cached) {
    throw MisuseError("sampling without a prompt, or with one longer than the cache");
  }
  Sequence sequence;
  sequence.prompt = index;
  sequence.tokens.assign(prompt.begin(), prompt.end());
  sequence.prompt_tokens = prompt.size();
  return sequence;
}

std::vector<Continuation> Generator::generate(std::span<const std::vector<std::int32_t>> prompts,
                                              const GenerateOptions& options, const EachToken& each) {
  first_.clear();
  std::vector<Continuation> all;
  const auto rows = static_cast<std::size_t>(shape_.batch);
  for (std::size_t begin = 0; begin < prompts.size(); begin += rows) {
    std::vector<Sequence> sequences;
    for (std::size_t i = begin; i < std::min(begin + rows, prompts.size()); ++i) {
      sequences.push_back(sequence_of(prompts[i], i));
      sequences.back().row = static_cast<std::int64_t>(i - begin);
      sequences.back().repeat = seen_[prompts[i]]++;
    }
    run(sequences, options, each);
    for (Sequence& sequence : sequences) all.push_back(continuation_of(sequence));
  }
  return all;
}

Continuation Generator::go_on(std::span<const std::int32_t> prompt, const GenerateOptions& options, std::uint64_t round,
                              const EachToken& each) {
  Sequence sequence = sequence_of(prompt, 0);
  sequence.repeat = round;
  // One token at least goes through the model again, for the logits behind it.
  const auto kept = std::ranges::mismatch(first_, prompt.first(prompt.size() - 1)).in1;
  sequence.cached = static_cast<std::size_t>(kept - first_.begin());
  first_.clear();  // until the row is known again
  run({&sequence, 1}, options, each);
  first_.assign(sequence.tokens.begin(), sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.cached));
  return continuation_of(sequence);
}

Continuation Generator::continuation_of(Sequence& sequence) {
  sequence.tokens.erase(sequence.tokens.begin(),
                        sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.prompt_tokens));
  return {std::move(sequence.tokens), sequence.finish};
}

void Generator::run(std::span<Sequence> sequences, const GenerateOptions& options, const EachToken& each) {
  fill(sequences);
  do {
    draw(sequences, options, each);
  } while (step(sequences));
}

void Generator::fill(std::span<Sequence> sequences) {
  for (;;) {
    std::vector<Sequence*> taking;
    std::vector<CachedStep> steps;
    for (Sequence& sequence : sequences) {
      const std::size_t left = sequence.tokens.size() - sequence.cached;
      if (left == 0) continue;
      const std::size_t count = std::min(left, static_cast<std::size_t>(shape_.sequence));
      taking.push_back(&sequence);
      steps.push_back({sequence.row, static_cast<std::int64_t>(sequence.cached),
                       std::span(sequence.tokens).subspan(sequence.cached, count)});
    }
    if (steps.empty()) return;
    decode(taking, steps, false);
  }
}

void Generator::draw(std::span<Sequence> sequences, const GenerateOptions& options, const EachToken& each) const {
  const auto finish = [](Sequence& sequence, Finish why) { sequence.ended = true, sequence.finish = why; };
  for (Sequence& sequence : sequences) {
    if (sequence.ended) continue;
    const std::size_t made = sequence.tokens.size() - sequence.prompt_tokens;
    const std::int32_t token =
        draw_token(sequence.logits, sequence.tokens, options.draw, {static_cast<std::uint64_t>(made), sequence.repeat});
    if (std::ranges::binary_search(options.end_tokens, token)) {
      finish(sequence, Finish::end_token);
      continue;
    }
    sequence.tokens.push_back(token);
    if (!each(sequence.prompt, token)) {
      finish(sequence, Finish::stop);
    } else if (static_cast<std::int64_t>(made) + 1 >= options.max_tokens) {
      finish(sequence, Finish::length);
    } else if (std::ssize(sequence.tokens) > shape_.cached) {
      finish(sequence, Finish::positions);
    }
  }
}

bool Generator::step(std::span<Sequence> sequences) {
  std::vector<Sequence*> taking;
  std::vector<CachedStep> steps;
  for (Sequence& sequence : sequences) {
    if (sequence.ended) continue;
    taking.push_back(&sequence);
    steps.push_back({sequence.row, static_cast<std::int64_t>(sequence.cached), std::span(sequence.tokens).last(1)});
  }
  if (steps.empty()) return false;
  decode(taking, steps, true);
  return true;
}

void Generator::decode(std::span<Sequence* const> taking, std::span<const CachedStep> steps, bool decodes) {
  const std::span<float> made(logits_.data(), steps.size() * vocabulary_);
  model_.decode(steps, decodes, made);
  for (std::size_t i = 0; i < taking.size(); ++i) {
    const std::span<float> own = made.subspan(i * vocabulary_, vocabulary_);
    taking[i]->logits.assign(own.begin(), own.end());
    taking[i]->cached += steps[i].tokens.size();
  }
}

}  // namespace tandem

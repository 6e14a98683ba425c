#pragma once
// Continues prompts, token by token, over the model's cache of keys and values.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "train/runtime/loaded_model.hpp"
#include "train/sampling/draw.hpp"

namespace tandem {

/// Reason why a sequence has ended.
enum class Finish {
  length,     ///< it has the number of tokens that was asked for
  end_token,  ///< the model drew a token that ends a text
  stop,       ///< the caller said so
  positions,  ///< the cache, or the model's positions, are full
};
/// "length", "end token", "stop", "positions".
std::string_view name_of(Finish finish) noexcept;

struct GenerateOptions {
  DrawOptions draw{};
  std::int64_t max_tokens = 100;
  std::vector<std::int32_t> end_tokens{};  ///< in rising order
};

struct Continuation {
  std::vector<std::int32_t> tokens;  ///< without the end token
  Finish finish = Finish::length;
};

/// Called with each new token and the index of its prompt; false ends the sequence.
using EachToken = std::function<bool(std::size_t prompt, std::int32_t token)>;

/// Rows of a cache, prompts after prompts. One thread drives it.
class Generator {
 public:
  /// Most tokens of a prompt that go through the model at once; longer prompts take turns, which bounds the memory of
  /// their activations.
  static constexpr std::int64_t most_at_once = 512;

  /// `model` has the cached shape `shape`, and must outlive it.
  Generator(LoadedModel& model, const RunShape& shape, std::int64_t vocabulary);

  /// Continues each prompt (not empty, at most the cache's positions), as many at once as the cache has rows. The
  /// tokens of a prompt do not depend on the others, except that prompts which are given again, also
  /// in a later call, get draws of their own.
  /// Positions computed are those of each prompt and its new tokens, but the last. Blocks. Throws as
  /// LoadedModel::decode, and what `each` throws.
  std::vector<Continuation> generate(std::span<const std::vector<std::int32_t>> prompts, const GenerateOptions& options,
                                     const EachToken& each);
  /// Continues one prompt in the first row, of which what the row still has from the call before is not computed again.
  /// `round`: number of the call, which gives it draws of its own.
  Continuation go_on(std::span<const std::int32_t> prompt, const GenerateOptions& options, std::uint64_t round,
                     const EachToken& each);

 private:
  struct Sequence {
    std::size_t prompt = 0;
    std::int64_t row = 0;
    std::uint64_t repeat = 0;
    std::vector<std::int32_t> tokens;  ///< prompt and new ones
    std::size_t prompt_tokens = 0;
    std::size_t cached = 0;     ///< tokens in the cache
    std::vector<float> logits;  ///< after the last token
    bool ended = false;
    Finish finish = Finish::length;
  };

  Sequence sequence_of(std::span<const std::int32_t> prompt, std::size_t index) const;
  void run(std::span<Sequence> sequences, const GenerateOptions& options, const EachToken& each);
  /// Puts the sequences' prompts into the cache.
  void fill(std::span<Sequence> sequences);
  /// Draws a token for each sequence that goes on.
  void draw(std::span<Sequence> sequences, const GenerateOptions& options, const EachToken& each) const;
  /// Computes the logits after the tokens that were drawn; false where no sequence goes on.
  bool step(std::span<Sequence> sequences);
  void decode(std::span<Sequence* const> taking, std::span<const CachedStep> steps, bool decodes);
  static Continuation continuation_of(Sequence& sequence);

  LoadedModel& model_;
  RunShape shape_;
  std::size_t vocabulary_;
  std::vector<float> logits_;                                ///< (B, V)
  std::vector<std::int32_t> first_;                          ///< tokens in the first row, of go_on()
  std::map<std::vector<std::int32_t>, std::uint64_t> seen_;  ///< how often each prompt has been given
};

}  // namespace tandem

#include "train/setup/processes.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/gloo_transport.hpp"
#include "comm/nccl/nccl_transport.hpp"
#include "comm/process_group.hpp"
#include "comm/rendezvous.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;

std::string text_of(const std::vector<Fact>& facts) {
  Json pairs = Json::array();
  for (const Fact& fact : facts) pairs.push_back({fact.name, fact.value});
  return pairs.dump();
}

std::vector<Fact> facts_in(const std::string& text) {
  std::vector<Fact> facts;
  for (const Json& pair : Json::parse(text)) facts.push_back({pair.at(0), pair.at(1)});
  return facts;
}

std::function<void(const std::string& line)> log_as(spdlog::level::level_enum level) {
  return [level](const std::string& line) { spdlog::log(level, "{}", line); };
}

}  // namespace

Processes::Processes(const LaunchFacts& launch, std::vector<Fact> facts)
    : rank_(launch.rank),
      local_rank_(launch.local_rank),
      rendezvous_(std::make_shared<Rendezvous>(RendezvousOptions{.rank = launch.rank,
                                                                 .host = launch.host,
                                                                 .port = launch.port,
                                                                 .secret = launch.secret,
                                                                 .facts = std::move(facts),
                                                                 .limits = {},
                                                                 .notice = log_as(spdlog::level::info),
                                                                 .warning = log_as(spdlog::level::warn)})) {}

Processes::~Processes() = default;

std::vector<std::string> Processes::gather(std::string_view what, std::string own) {
  if (!several()) return {std::move(own)};
  return rendezvous_->meet(Rendezvous::of_others, std::string(what), std::move(own));
}

std::vector<std::string> Processes::gather_bytes(std::string_view what, std::span<const std::byte> own) {
  std::vector<std::string> all(static_cast<std::size_t>(rank_.count));
  const std::string call = fmt::format("{} of {} bytes", what, own.size());
  std::size_t done = 0;
  do {
    const std::span<const std::byte> piece = own.subspan(done, std::min(value_limit, own.size() - done));
    const auto pieces = gather(call, {reinterpret_cast<const char*>(piece.data()), piece.size()});
    for (std::size_t rank = 0; rank < all.size(); ++rank) all[rank] += pieces[rank];
    done += piece.size();
  } while (done < own.size());
  return all;
}

std::string Processes::of_first(std::string_view what, std::string own) {
  return gather(what, is_first() ? std::move(own) : std::string()).front();
}

bool Processes::of_first(std::string_view what, bool own) {
  return of_first(what, std::string(own ? "1" : "0")) == "1";
}

bool Processes::any(std::string_view what, bool own) {
  return std::ranges::count(gather(what, own ? "1" : "0"), "1") > 0;
}

void Processes::agree(const std::vector<Fact>& facts) {
  std::vector<std::vector<Fact>> all;
  for (const std::string& text : gather("facts of the run", text_of(facts))) all.push_back(facts_in(text));
  if (const std::string text = difference_of(all); !text.empty()) throw UsageError(text);
}

std::unique_ptr<Group> Processes::make_group(Device& device, double watchdog_seconds) {
  auto transport = device.info().kind == "cuda" ? make_nccl_transport(*rendezvous_, device, watchdog_seconds)
                                                : make_gloo_transport(*rendezvous_, device, watchdog_seconds);
  return make_process_group(rendezvous_, std::move(transport), device);
}

void Processes::fail(const std::exception_ptr& error) noexcept {
  if (rendezvous_) rendezvous_->fail(error);
}

}  // namespace tandem

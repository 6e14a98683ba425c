#include "offload/engine/plan_agreement.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"

namespace tandem {
namespace {

/// A rank's report on the plan that it is to go on with.
struct PlanOfRank {
  enum class Fits : std::uint64_t { yes, no_room, no };
  Fits fits = Fits::yes;
  std::array<unsigned char, 16> kind{};  ///< hash of what all plans have in common

  void require_as(const PlanOfRank& first, int rank) const {
    constexpr const char* advice = "make the plans of all ranks with the same options and ceilings";
    if (fits == Fits::no_room) throw PlanError(fmt::format("rank {} has no room for its plan", rank), {}, advice);
    if (fits == Fits::no) throw MisuseError(fmt::format("the plan of rank {} is not for its engine", rank), {}, advice);
    if (kind == first.kind) return;
    throw MisuseError(fmt::format("the plan of rank {} is not of one kind with that of rank 0", rank), {}, advice);
  }
};

void require_made_for(const Plan& plan, const ParameterLayout& layout, const OffloadOptions& options, Rank own) {
  check_options(layout, options);
  require_plan_of(layout, plan);
  if (plan.state != options.state || plan.max_micro_batches != options.max_micro_batches) {
    const auto words = [](StateFormat state, int micro_batches) {
      return fmt::format("{} state and {} micro-batches", name_of(state), micro_batches);
    };
    throw MisuseError("the plan was made with other options",
                      fmt::format("it is for {}, the options have {}", words(plan.state, plan.max_micro_batches),
                                  words(options.state, options.max_micro_batches)),
                      "give the engine those that the plan was made with");
  }
  if (plan.rank != own || options.rank != own) {
    const auto words = [](Rank rank) { return fmt::format("rank {} of {}", rank.index, rank.count); };
    throw MisuseError("the plan is another rank's",
                      fmt::format("it is for {}, the options are for {}, the group has the engine as {}",
                                  words(plan.rank), words(options.rank), words(own)));
  }
}

}  // namespace

void require_plan_of(const ParameterLayout& layout, const Plan& plan) {
  if (plan.storage_hash != layout.storage_hash()) {
    throw MisuseError("the plan was made for another layout", {}, "make one of this layout");
  }
}

void agree_on_plan(Group* group, const Plan& plan, const std::function<void()>& require_fit) {
  if (group == nullptr) return require_fit();
  std::vector<PlanOfRank> all(static_cast<std::size_t>(group->rank().count));
  PlanOfRank& own = all[static_cast<std::size_t>(group->rank().index)];
  std::exception_ptr refusal;
  try {
    require_fit();
  } catch (const PlanError&) {
    refusal = std::current_exception();
    own.fits = PlanOfRank::Fits::no_room;
  } catch (const Error&) {
    refusal = std::current_exception();
    own.fits = PlanOfRank::Fits::no;
  }
  const std::string text = plan.common_text();
  Hash128 hash;
  hash.add(text.data(), text.size());
  own.kind = hash.bytes();
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    group->broadcast(Channel::engine, static_cast<int>(rank), std::as_writable_bytes(std::span(&all[rank], 1)));
  }
  if (refusal) std::rethrow_exception(refusal);
  for (std::size_t rank = 0; rank < all.size(); ++rank) all[rank].require_as(all[0], static_cast<int>(rank));
}

const Plan& checked_plan(const Plan& plan, const ParameterLayout& layout, const OffloadOptions& options, Group* group) {
  const Rank own = group == nullptr ? Rank{} : group->rank();
  agree_on_plan(group, plan, [&] { require_made_for(plan, layout, options, own); });
  return plan;
}

}  // namespace tandem

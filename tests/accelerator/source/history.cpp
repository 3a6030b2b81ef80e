#include "history.h"

namespace accelerator {
namespace {

std::string name_of(Actor actor) {
  return actor == kHost ? "the host" : "stream " + std::to_string(actor - 1);
}

std::string described(const Access& later, const Access& earlier) {
  return later.operation + (later.writes ? " writes" : " reads") + " on " + name_of(later.actor) + " unordered after " +
         earlier.operation + (earlier.writes ? " wrote" : " read") + " on " + name_of(earlier.actor);
}

}  // namespace

std::optional<std::string> History::add(Access access, const Clock& clock) {
  std::optional<std::string> race;
  std::vector<Access> kept;
  for (auto& earlier : accesses_) {
    const bool overlap = earlier.low < access.high && access.low < earlier.high;
    const bool ordered = earlier.actor == access.actor || clock.of(earlier.actor) >= earlier.time;
    if (overlap && (access.writes || earlier.writes) && !ordered && !race) race = described(access, earlier);
    // Whoever races with an access that this one covers races with this one too.
    const bool inside = access.low <= earlier.low && earlier.high <= access.high;
    const bool same_reader = !earlier.writes && earlier.actor == access.actor;
    if (!(inside && ordered && (access.writes || same_reader))) kept.push_back(std::move(earlier));
  }
  kept.push_back(std::move(access));
  accesses_ = std::move(kept);
  return race;
}

}  // namespace accelerator

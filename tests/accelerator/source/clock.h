// Vector clocks: what an actor knows of the progress of every other (Lamport; Fidge; Mattern).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace accelerator {

using Actor = int;  // the host, all of its threads together, or 1 + the number of a stream
constexpr Actor kHost = 0;
constexpr Actor actor_of(int stream) { return 1 + stream; }

class Clock {
 public:
  uint64_t of(Actor actor) const { return size_t(actor) < times_.size() ? times_[actor] : 0; }

  void tick(Actor actor) {
    if (times_.size() <= size_t(actor)) times_.resize(actor + 1);
    ++times_[actor];
  }

  // Everything that the other knows is known from here on.
  void join(const Clock& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<uint64_t> times_;
};

}  // namespace accelerator

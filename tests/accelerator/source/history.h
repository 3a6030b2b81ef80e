// The happens-before checker: accesses of one block of memory, and which of them nothing orders.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "clock.h"

namespace accelerator {

struct Access {
  const char* low;
  const char* high;
  Actor actor;
  uint64_t time;  // of the actor
  bool writes;
  std::string operation;
};

class History {
 public:
  // Adds an access by an actor with such a clock. Says which earlier access it races with, if with any: they overlap, one of
  // them writes, and the actor does not know that the earlier one has happened.
  std::optional<std::string> add(Access access, const Clock& clock);

 private:
  std::vector<Access> accesses_;  // those that a later access may still race with
};

}  // namespace accelerator

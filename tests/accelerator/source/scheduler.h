// Streams: queues of tasks that run in the thread of whoever must wait, or earlier, as a seed has it.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "clock.h"

namespace accelerator {

// A point in a stream: passed when all that was queued before it has run.
struct Mark {
  int stream = 0;
  bool passed = false;
  Clock clock;
  double time_ms = 0;
};
using MarkRef = std::shared_ptr<Mark>;

using Lock = std::lock_guard<std::recursive_mutex>;

class Scheduler {
 public:
  // Of queues, clocks and memory. Never held while a task runs.
  std::recursive_mutex state;

  // `share` is the chance that tasks run when one is queued: 0 runs none before somebody must wait, 1 runs all at once.
  void configure(double share, uint64_t seed);
  // Runs all that is queued; a failure is forgotten.
  void finish();
  // What a task's name has to contain, and how many such tasks succeed first: the next one fails, as a kernel does.
  void fail(std::string name, int after);

  int add_stream();
  void enqueue(int stream, std::string name, std::function<void()> run);
  MarkRef mark(int stream);
  void make_wait(int stream, const MarkRef& mark);

  // The host waits. `kind` is what the wait is counted as.
  void wait(const MarkRef& mark, const std::string& kind);
  void wait_for_stream(int stream, const std::string& kind);
  void wait_for_all(const std::string& kind);
  // What the host does itself, in place of a stream that has got so far: it knows no more than before.
  void run_stream(int stream);
  // As far as the host can see without waiting; it lets a task run first.
  bool has_passed(const MarkRef& mark);
  bool is_idle(int stream);

  // Runs some tasks, or none: an operation has been queued.
  void run_some();
  bool run_one();

  // An operation of this stream begins: it knows what the host knows.
  void begin(int stream);
  Clock& clock(Actor actor);
  bool in_task() const;
  size_t pending() const;

  // Waits of the host since they were last taken: thread, kind, count.
  std::map<std::pair<long, std::string>, int> take_waits();
  void count_wait(const std::string& kind);
  // Raises what has failed: all that is asked of a device does, from the failure on. Who frees or ends something does not ask.
  void raise_failure();
  bool has_failed() const { return !failure_.empty(); }
  template <class T> void shuffle(T& items) { std::shuffle(items.begin(), items.end(), random_); }

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    MarkRef after;
  };
  struct Stream {
    std::deque<Task> tasks;
    Clock clock;
  };

  void run_until(const MarkRef& mark);
  void run_next(int stream);
  void run(const Task& task);

  std::recursive_mutex running_;
  std::deque<Stream> streams_ = std::deque<Stream>(1);
  Clock host_;
  std::mt19937_64 random_{0};
  double share_ = 0;
  std::string failure_;
  std::string failing_;
  int failing_after_ = -1;
  std::map<std::pair<long, std::string>, int> waits_;
};

Scheduler& scheduler();

}  // namespace accelerator

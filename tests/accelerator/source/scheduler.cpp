#include "scheduler.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <chrono>
#include <numeric>
#include <utility>

#include "without_autograd.h"

namespace accelerator {
namespace {

constexpr size_t kLongestQueue = 4000;  // tasks, of all streams: beyond them, the oldest run
thread_local int depth = 0;             // of tasks that run in this thread

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Scheduler& scheduler() {
  static Scheduler* instance = new Scheduler;  // lives as long as tensors that are freed at exit
  return *instance;
}

void Scheduler::configure(double share, uint64_t seed) {
  Lock lock(state);
  share_ = share;
  random_.seed(seed);
  waits_.clear();
}

void Scheduler::finish() {
  {
    Lock lock(state);
    failing_after_ = -1;
  }
  try {
    wait_for_all("finish");
  } catch (const c10::AcceleratorError&) {
  }
  Lock lock(state);
  failure_.clear();
}

void Scheduler::fail(std::string name, int after) {
  Lock lock(state);
  failing_ = std::move(name);
  failing_after_ = after;
}

int Scheduler::add_stream() {
  Lock lock(state);
  streams_.emplace_back();
  return int(streams_.size()) - 1;
}

void Scheduler::enqueue(int stream, std::string name, std::function<void()> run) {
  Lock lock(state);
  streams_[stream].clock.join(host_);
  streams_[stream].tasks.push_back({std::move(name), std::move(run), nullptr});
}

MarkRef Scheduler::mark(int stream) {
  Lock lock(state);
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  streams_[stream].clock.join(host_);
  mark->clock = streams_[stream].clock;
  streams_[stream].tasks.push_back({"event", [mark] {
                                      mark->time_ms = now_ms();
                                      mark->passed = true;
                                    },
                                    nullptr});
  return mark;
}

void Scheduler::make_wait(int stream, const MarkRef& mark) {
  Lock lock(state);
  streams_[stream].clock.join(host_);
  streams_[stream].clock.join(mark->clock);
  streams_[stream].tasks.push_back({"wait", nullptr, mark});
}

void Scheduler::wait(const MarkRef& mark, const std::string& kind) {
  count_wait(kind);
  run_until(mark);
  {
    Lock lock(state);
    host_.join(mark->clock);
  }
  raise_failure();
}

void Scheduler::wait_for_stream(int stream, const std::string& kind) { wait(mark(stream), kind); }

void Scheduler::wait_for_all(const std::string& kind) {
  count_wait(kind);
  std::vector<MarkRef> marks;
  {
    Lock lock(state);
    for (size_t i = 0; i < streams_.size(); ++i) marks.push_back(mark(int(i)));
    shuffle(marks);
  }
  for (auto& mark : marks) {
    run_until(mark);
    Lock lock(state);
    host_.join(mark->clock);
  }
  raise_failure();
}

void Scheduler::run_stream(int stream) {
  run_until(mark(stream));
  raise_failure();
}

bool Scheduler::has_passed(const MarkRef& mark) {
  if (!mark->passed) run_one();
  Lock lock(state);
  if (mark->passed) host_.join(mark->clock);
  return mark->passed;
}

bool Scheduler::is_idle(int stream) {
  run_one();
  Lock lock(state);
  if (!streams_[stream].tasks.empty()) return false;
  host_.join(streams_[stream].clock);
  return true;
}

void Scheduler::run_some() {
  if (in_task()) return;
  size_t waiting = pending(), runs = 0;
  {
    Lock lock(state);
    if (share_ >= 1) {
      runs = size_t(-1);
    } else if (std::uniform_real_distribution<>(0, 1)(random_) < share_) {
      runs = random_() % 6;
    }
  }
  for (; runs && run_one(); --runs) {
  }
  for (; waiting > kLongestQueue; --waiting) run_one();
}

bool Scheduler::run_one() {
  Lock one_at_a_time(running_);
  int stream;
  {
    Lock lock(state);
    std::vector<int> ready;
    for (size_t i = 0; i < streams_.size(); ++i) {
      auto& tasks = streams_[i].tasks;
      if (!tasks.empty() && (!tasks.front().after || tasks.front().after->passed)) ready.push_back(int(i));
    }
    if (ready.empty()) return false;
    stream = ready[random_() % ready.size()];
  }
  run_next(stream);
  return true;
}

void Scheduler::begin(int stream) {
  Lock lock(state);
  streams_[stream].clock.join(host_);
  streams_[stream].clock.tick(actor_of(stream));
}

Clock& Scheduler::clock(Actor actor) { return actor == kHost ? host_ : streams_[actor - 1].clock; }

bool Scheduler::in_task() const { return depth > 0; }

size_t Scheduler::pending() const {
  Lock lock(const_cast<std::recursive_mutex&>(state));
  return std::accumulate(streams_.begin(), streams_.end(), size_t(0),
                         [](size_t sum, const Stream& stream) { return sum + stream.tasks.size(); });
}

std::map<std::pair<long, std::string>, int> Scheduler::take_waits() {
  Lock lock(state);
  return std::exchange(waits_, {});
}

void Scheduler::count_wait(const std::string& kind) {
  Lock lock(state);
  ++waits_[{long(gettid()), kind}];
}

void Scheduler::raise_failure() {
  Lock lock(state);
  if (!failure_.empty()) throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 700, "CUDA error: " + failure_);
}

void Scheduler::run_until(const MarkRef& mark) {
  Lock one_at_a_time(running_);
  while (!mark->passed) run_next(mark->stream);
}

void Scheduler::run_next(int stream) {
  MarkRef after;
  {
    Lock lock(state);
    if (streams_[stream].tasks.empty()) return;
    after = streams_[stream].tasks.front().after;
  }
  if (after) run_until(after);
  Task task;
  {
    Lock lock(state);
    task = std::move(streams_[stream].tasks.front());
    streams_[stream].tasks.pop_front();
  }
  if (task.run) run(task);
}

void Scheduler::run(const Task& task) {
  if (task.name != "event") {
    Lock lock(state);
    if (!failure_.empty()) return;  // nothing runs on a device after an error
    if (failing_after_ >= 0 && task.name.find(failing_) != std::string::npos && failing_after_-- == 0) {
      failure_ = "an illegal memory access was encountered (" + task.name + ")";
      return;
    }
  }
  ++depth;
  try {
    without_autograd(task.run);
  } catch (const std::exception& error) {
    Lock lock(state);
    if (failure_.empty()) failure_ = task.name + ": " + error.what();
  }
  --depth;
}

}  // namespace accelerator

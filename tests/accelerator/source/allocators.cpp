#include "allocators.h"

#include <cstdlib>
#include <cstring>

#include "memory.h"

namespace accelerator {
namespace {

using c10::CachingAllocator::StatArray;
using c10::Device;
using c10::DataPtr;

constexpr size_t kUnit = 512;
constexpr size_t kSmall = size_t(1) << 20;
thread_local int stream_of_thread = 0;

// torch cuts what is left off a block that was larger, but not a last MiB of a large one: here each large block has that.
size_t block_size(size_t whole) { return whole > kSmall ? whole + kSmall : whole; }

bool have_passed(const std::vector<MarkRef>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->passed; });
}

std::vector<MarkRef> marks_of(const std::set<int>& streams) {
  std::vector<MarkRef> marks;
  for (int stream : streams) marks.push_back(scheduler().mark(stream));
  return marks;
}

// Caches by stream and whole blocks: what is freed can be taken again on its stream, and on no other.
class Caching final : public c10::DeviceAllocator {
 public:
  DataPtr allocate(size_t wanted) override {
    if (!wanted) return {nullptr, nullptr, &release, Device(c10::kCUDA, 0)};
    const size_t whole = (wanted + kUnit - 1) / kUnit * kUnit;
    const size_t size = block_size(whole);
    const int stream = current_stream();
    char* start = taken(stream, size);
    if (!start) {
      scheduler().wait_for_all("allocation");
      Lock lock(scheduler().state);
      ++stats_.num_alloc_retries;
      start = taken(stream, size);
    }
    if (!start) {
      give_back();
      start = taken(stream, size);
    }
    if (!start) tell_observers(whole);
    Lock lock(scheduler().state);
    if (!start) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", whole, " bytes of ", memory().capacity,
                       "; ", stats_.allocated_bytes[0].current, " are allocated, ", memory().driver_bytes, " are the driver's.");
    }
    const size_t held = memory().blocks.at(start).size;
    count(stats_.allocated_bytes, held, true);
    count(stats_.active_bytes, held, true);
    count(stats_.requested_bytes, wanted, true);
    requested_[start] = wanted;
    return {start, start, &release, Device(c10::kCUDA, 0)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override {
    scheduler().wait_for_all("copy_data");
    memcpy(memory().addresses.in_task(to), memory().addresses.in_task(from), size);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override { give_back(); }

  void recordStream(const DataPtr& data, c10::Stream stream) override {
    Lock lock(scheduler().state);
    Block* block = memory().find(data.get());
    if (block && !block->pinned && !block->mapped) block->recorded.insert(int(stream.id()));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(scheduler().state);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    Lock lock(scheduler().state);
    for (auto* stats : all_stats())
      for (auto& stat : *stats) stat.reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock(scheduler().state);
    for (auto* stats : all_stats())
      for (auto& stat : *stats) stat.reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock(scheduler().state);
    return {memory().capacity - reserved() - memory().driver_bytes, memory().capacity};
  }

  // Without the lock: observers ask for numbers.
  void tell_observers(size_t size) {
    const auto [free, total] = getMemoryInfo(0);
    for (auto& observer : observers_) observer(0, int64_t(size), int64_t(total), int64_t(free));
  }

  void observe(Observer observer) { observers_.push_back(std::move(observer)); }

  size_t reserved() const { return size_t(stats_.reserved_bytes[0].current); }

 private:
  static void release(void* start) { static_cast<Caching&>(device_allocator()).free(static_cast<char*>(start)); }

  // Whole segments count as large ones from 1 MiB on, as torch's do.
  static void count(StatArray& stats, size_t size, bool more) {
    for (size_t kind : {size_t(0), size_t(size < kSmall ? 1 : 2)}) {
      more ? stats[kind].increase(size) : stats[kind].decrease(size);
    }
  }

  std::array<StatArray*, 4> all_stats() {
    return {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes};
  }

  void free(char* start) {
    Lock lock(scheduler().state);
    auto found = memory().blocks.find(start);
    if (found == memory().blocks.end()) return;
    Block& block = found->second;
    count(stats_.allocated_bytes, block.size, false);
    count(stats_.requested_bytes, requested_[start], false);
    block.recorded.erase(block.stream);
    if (block.recorded.empty()) return settle(block);
    used_elsewhere_.emplace_back(start, marks_of(block.recorded));
  }

  // The block's stream may use it for something else from here on.
  void settle(Block& block) {
    scheduler().begin(block.stream);
    memory().touch(actor_of(block.stream), block.start, block.start + block.size, true, "free");
    block.recorded.clear();
    memory().poison(block.stream, block.start, block.size);
    count(stats_.active_bytes, block.size, false);
    free_[block.stream].emplace(block.size, block.start);
  }

  void settle_what_has_passed() {
    for (size_t i = 0; i < used_elsewhere_.size();) {
      auto& [start, marks] = used_elsewhere_[i];
      if (!have_passed(marks)) {
        ++i;
        continue;
      }
      Block& block = memory().blocks.at(start);
      for (auto& mark : marks) scheduler().clock(actor_of(block.stream)).join(mark->clock);
      settle(block);
      used_elsewhere_.erase(used_elsewhere_.begin() + long(i));
    }
  }

  char* taken(int stream, size_t size) {
    Lock lock(scheduler().state);
    settle_what_has_passed();
    auto& blocks = free_[stream];
    if (auto fitting = blocks.find(size); fitting != blocks.end()) {
      char* start = fitting->second;
      blocks.erase(fitting);
      return start;
    }
    if (reserved() + memory().driver_bytes + size > memory().capacity) return nullptr;
    char* start = memory().addresses.take(size, 4096);
    memory().blocks.emplace(start, Block{start, size, stream, false, {}, {}, {}});
    count(stats_.reserved_bytes, size, true);
    memory().poison(stream, start, size);
    return start;
  }

  void give_back() {
    scheduler().wait_for_all("empty_cache");
    std::vector<std::pair<size_t, char*>> unused;
    {
      Lock lock(scheduler().state);
      settle_what_has_passed();
      for (auto& [stream, blocks] : free_) {
        unused.insert(unused.end(), blocks.begin(), blocks.end());
        blocks.clear();
      }
    }
    scheduler().wait_for_all("empty_cache");  // for what has been poisoned just now
    Lock lock(scheduler().state);
    for (auto& [size, start] : unused) {
      count(stats_.reserved_bytes, size, false);
      memory().addresses.give_up(start, size);
      memory().blocks.erase(start);
    }
  }

  std::map<int, std::multimap<size_t, char*>> free_;  // by stream
  std::vector<std::pair<char*, std::vector<MarkRef>>> used_elsewhere_;
  std::map<char*, size_t> requested_;
  std::vector<Observer> observers_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// A freed block goes when the copies that were recorded on it are done.
class Pinned final : public at::HostAllocator {
 public:
  DataPtr allocate(size_t size) override {
    Lock lock(scheduler().state);
    settle_what_has_passed();
    if (!size) return {nullptr, nullptr, &release, Device(c10::kCPU)};
    void* start = nullptr;
    TORCH_CHECK(!posix_memalign(&start, 4096, size), "no pinned memory is left");
    memset(start, 0xff, size);
    char* bytes = static_cast<char*>(start);
    memory().blocks.emplace(bytes, Block{bytes, size, 0, true, {}, {}, {}});
    memory().pinned += size;
    return {start, start, &release, Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

  bool record_event(void* address, void*, c10::Stream stream) override {
    Lock lock(scheduler().state);
    Block* block = memory().find(address);
    if (!block || !block->pinned) return false;
    block->recorded.insert(int(stream.id()));
    return true;
  }

  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void release(void* start) { static_cast<Pinned&>(host_allocator()).free(static_cast<char*>(start)); }

  void free(char* start) {
    Lock lock(scheduler().state);
    auto found = memory().blocks.find(start);
    if (found == memory().blocks.end()) return;
    if (found->second.recorded.empty()) return drop(start);
    used_elsewhere_.emplace_back(start, marks_of(found->second.recorded));
  }

  void drop(char* start) {
    const size_t size = memory().blocks.at(start).size;
    memory().touch(kHost, start, start + size, true, "free");
    memset(start, 0xff, size);
    memory().pinned -= size;
    memory().blocks.erase(start);
    ::free(start);
  }

  void settle_what_has_passed() {
    for (size_t i = 0; i < used_elsewhere_.size();) {
      auto& [start, marks] = used_elsewhere_[i];
      if (!have_passed(marks)) {
        ++i;
        continue;
      }
      for (auto& mark : marks) scheduler().clock(kHost).join(mark->clock);
      drop(start);
      used_elsewhere_.erase(used_elsewhere_.begin() + long(i));
    }
  }

  std::vector<std::pair<char*, std::vector<MarkRef>>> used_elsewhere_;
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* instance = new Caching;
  return *instance;
}

void observe_out_of_memory(Observer observer) {
  static_cast<Caching&>(device_allocator()).observe(std::move(observer));
}

at::HostAllocator& host_allocator() {
  static auto* instance = new Pinned;
  return *instance;
}

int current_stream() { return stream_of_thread; }

int exchange_stream(int stream) { return std::exchange(stream_of_thread, stream); }

size_t reserved_bytes() { return static_cast<Caching&>(device_allocator()).reserved(); }

}  // namespace accelerator

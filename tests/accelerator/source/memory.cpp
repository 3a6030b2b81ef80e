#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace accelerator {
namespace {

constexpr size_t kSpan = size_t(1) << 40;
constexpr size_t kPage = 4096;

char* reserve(int protection) {
  void* start = mmap(nullptr, kSpan, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::runtime_error("the test accelerator cannot reserve its addresses");
  return static_cast<char*>(start);
}

size_t up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

}  // namespace

Addresses::Addresses() : device_(reserve(PROT_NONE)), tasks_(reserve(PROT_READ | PROT_WRITE)) {
  next_ = up(size_t(device_), size_t(1) << 21) - size_t(device_);
}

bool Addresses::is_device(const void* address) const {
  return static_cast<const char*>(address) >= device_ && static_cast<const char*>(address) < device_ + kSpan;
}

char* Addresses::in_task(const void* address) const {
  char* start = static_cast<char*>(const_cast<void*>(address));
  return is_device(address) ? tasks_ + (start - device_) : start;
}

char* Addresses::take(size_t size, size_t alignment) {
  const size_t start = up(size_t(device_) + next_, alignment) - size_t(device_);
  if (start + size + kPage > kSpan) throw std::runtime_error("the test accelerator has no addresses left");
  next_ = start + up(size, kPage) + kPage;  // a page that nobody may use lies between
  return device_ + start;
}

void Addresses::give_up(char* start, size_t size) {
  madvise(in_task(start), up(size, kPage), MADV_DONTNEED);  // a task that comes too late has been reported, and does no harm
}

void Addresses::show(char* start, const Physical& memory) {
  void* shown = mmap(in_task(start), memory.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.file, 0);
  if (shown == MAP_FAILED) throw std::runtime_error("the test accelerator cannot map its memory");
}

void Addresses::hide(char* start, size_t size) {
  mmap(in_task(start), size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

Physical::Physical(size_t size) : size(size), file(memfd_create("accelerator", MFD_CLOEXEC)) {
  if (file < 0 || ftruncate(file, off_t(size))) throw std::runtime_error("the test accelerator has no memory left");
}

Physical::~Physical() { close(file); }

Memory& memory() {
  static Memory* instance = new Memory;  // lives as long as tensors that are freed at exit
  return *instance;
}

Block* Memory::find(const void* address) {
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == blocks.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return static_cast<const char*>(address) < block.start + block.size ? &block : nullptr;
}

bool Memory::is_pinned(const void* address) {
  Lock lock(scheduler().state);
  const Block* block = find(address);
  return block && block->pinned;
}

void Memory::touch(Actor actor, char* low, char* high, bool writes, const std::string& operation) {
  if (!low || low >= high) return;
  Lock lock(scheduler().state);
  Block* block = find(low);
  if (!block) {
    if (addresses.is_device(low)) throw std::runtime_error("CUDA error: " + operation + " uses device memory that nobody has");
    return;
  }
  if (high > block->start + block->size) throw std::runtime_error("CUDA error: " + operation + " goes beyond the memory that it begins in");
  if (block->mapped) {
    const size_t first = low - block->start, last = high - block->start;
    size_t there = first;
    auto piece = block->mapped->upper_bound(first);
    if (piece != block->mapped->begin()) --piece;
    for (; piece != block->mapped->end() && piece->first <= there; ++piece) there = std::max(there, piece->first + piece->second->size);
    if (there < last) {
      throw std::runtime_error("CUDA error: " + operation + " uses device addresses that have no memory");
    }
  }
  const bool is_known = touch_addresses(actor, *block, low, high, writes, operation);
  if (!block->mapped) return;
  const Clock& clock = scheduler().clock(actor);
  auto piece = std::prev(block->mapped->upper_bound(low - block->start));
  for (; piece != block->mapped->end() && block->start + piece->first < high; ++piece) {
    const char* start = block->start + piece->first;
    const size_t first = std::max<const char*>(low, start) - start, last = std::min<const char*>(high, start + piece->second->size) - start;
    const char* origin = nullptr;  // offsets into the memory
    auto race = piece->second->history.add({origin + first, origin + last, actor, clock.of(actor), writes, operation}, clock);
    if (!is_known) note(race, "memory of the device, by another address");
  }
}

void Memory::touch_pinned(char* low, char* high, bool writes, const std::string& operation) {
  if (!low || low >= high) return;
  Lock lock(scheduler().state);
  auto after = blocks.upper_bound(low);
  if (after != blocks.begin()) --after;
  for (; after != blocks.end() && after->first < high; ++after) {
    Block& block = after->second;
    char* end = block.start + block.size;
    if (block.pinned && end > low) touch_addresses(kHost, block, std::max(low, block.start), std::min(high, end), writes, operation);
  }
}

bool Memory::touch_addresses(Actor actor, Block& block, char* low, char* high, bool writes, const std::string& operation) {
  Clock& clock = scheduler().clock(actor);
  if (actor == kHost) clock.tick(kHost);
  auto race = block.history.add({low, high, actor, clock.of(actor), writes, operation}, clock);
  note(race, block.pinned ? "pinned memory of the host" : "memory of the device");
  return race.has_value();
}

void Memory::note(const std::optional<std::string>& race, const std::string& what) {
  if (race && !scheduler().has_failed()) races.push_back(*race + " (" + what + ")");
}

void Memory::poison(int stream, char* start, size_t size) {
  scheduler().enqueue(stream, "poison", [start, size] { memset(memory().addresses.in_task(start), 0xff, size); });
}

}  // namespace accelerator

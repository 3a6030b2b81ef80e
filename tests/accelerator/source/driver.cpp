// The driver's virtual memory, by the names that libcuda.so.1 exports.
#include <cstring>

#include "memory.h"

namespace {

using namespace accelerator;
using Result = int;
using Address = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2;
constexpr size_t kGranule = size_t(2) << 20;

struct Handle {
  std::shared_ptr<Physical> memory;
  int maps = 0;
  bool released = false;
};

std::map<Address, Handle>& handles() {
  static auto* instance = new std::map<Address, Handle>;
  return *instance;
}
std::map<Address, Address>& mapped_handles() {  // by address
  static auto* instance = new std::map<Address, Address>;
  return *instance;
}
Address last_handle = 0;

void free_unused(Address handle) {
  auto found = handles().find(handle);
  if (found->second.maps || !found->second.released) return;
  memory().driver_bytes -= found->second.memory->size;
  handles().erase(found);
}

}  // namespace

extern "C" {

Result cuInit(unsigned) { return kSuccess; }

Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

Result cuGetErrorString(Result result, const char** text) {
  *text = result == kOutOfMemory ? "out of memory" : result == kSuccess ? "no error" : "invalid argument";
  return kSuccess;
}

Result cuMemGetAllocationGranularity(size_t* granularity, const void*, unsigned) {
  *granularity = kGranule;
  return kSuccess;
}

Result cuMemAddressReserve(Address* address, size_t size, size_t alignment, Address, unsigned long long) {
  if (!size || size % kGranule) return kInvalidValue;
  Lock lock(scheduler().state);
  char* start = memory().addresses.take(size, std::max(alignment, kGranule));
  Block block{start, size, 0, false, {}, {}, {}};
  block.mapped.emplace();
  memory().blocks.emplace(start, std::move(block));
  *address = Address(start);
  return kSuccess;
}

Result cuMemAddressFree(Address address, size_t size) {
  Lock lock(scheduler().state);
  auto block = memory().blocks.find(reinterpret_cast<char*>(address));
  if (block == memory().blocks.end() || block->second.size != size || !block->second.mapped->empty()) return kInvalidValue;
  memory().addresses.give_up(block->second.start, size);
  memory().blocks.erase(block);
  return kSuccess;
}

Result cuMemCreate(Address* handle, size_t size, const void*, unsigned long long) {
  if (!size || size % kGranule) return kInvalidValue;
  Lock lock(scheduler().state);
  size_t reserved = reserved_bytes();
  if (reserved + memory().driver_bytes + size > memory().capacity) return kOutOfMemory;
  memory().driver_bytes += size;
  *handle = ++last_handle;
  handles()[*handle] = {std::make_shared<Physical>(size)};
  return kSuccess;
}

Result cuMemRelease(Address handle) {
  Lock lock(scheduler().state);
  auto found = handles().find(handle);
  if (found == handles().end() || found->second.released) return kInvalidValue;
  found->second.released = true;
  free_unused(handle);
  return kSuccess;
}

Result cuMemMap(Address address, size_t size, size_t offset, Address handle, unsigned long long) {
  Lock lock(scheduler().state);
  Block* block = memory().find(reinterpret_cast<char*>(address));
  auto found = handles().find(handle);
  if (!block || !block->mapped || found == handles().end() || offset || size != found->second.memory->size) return kInvalidValue;
  const size_t at = reinterpret_cast<char*>(address) - block->start;
  if (at % kGranule || at + size > block->size || block->mapped->count(at)) return kInvalidValue;
  const bool is_new = !found->second.maps++;
  mapped_handles()[address] = handle;
  memory().addresses.show(block->start + at, *found->second.memory);
  if (is_new) memset(memory().addresses.in_task(block->start + at), 0xff, size);
  // Whoever uses these addresses knows that they were mapped, since the host has told it so; and new memory, too.
  (*block->mapped)[at] = found->second.memory;
  char* start = block->start + at;
  if (is_new) memory().touch(kHost, start, start + size, true, "cuMemMap");
  else memory().touch_addresses(kHost, *block, start, start + size, true, "cuMemMap");
  return kSuccess;
}

Result cuMemSetAccess(Address, size_t, const void*, size_t) { return kSuccess; }

// Only whole mappings: whoever unmaps has waited for all that used them.
Result cuMemUnmap(Address address, size_t size) {
  Lock lock(scheduler().state);
  Block* block = memory().find(reinterpret_cast<char*>(address));
  if (!block || !block->mapped) return kInvalidValue;
  const size_t first = reinterpret_cast<char*>(address) - block->start;
  size_t end = first;
  for (auto piece = block->mapped->find(end); piece != block->mapped->end() && end < first + size; piece = block->mapped->find(end)) {
    end += piece->second->size;
  }
  if (end != first + size) return kInvalidValue;
  // Others may use the memory by other addresses.
  memory().touch_addresses(kHost, *block, block->start + first, block->start + end, true, "cuMemUnmap");
  for (size_t at = first; at < end;) {
    const Address where = Address(block->start + at), handle = mapped_handles()[where];
    const size_t length = handles().at(handle).memory->size;
    memory().addresses.hide(block->start + at, length);
    block->mapped->erase(at);
    mapped_handles().erase(where);
    --handles().at(handle).maps;
    free_unused(handle);
    at += length;
  }
  return kSuccess;
}

}  // extern "C"

// The device's addresses, and the blocks of memory whose accesses are checked: the device's, and the host's that are pinned.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "history.h"
#include "scheduler.h"

namespace accelerator {

// Device addresses are not mapped: who reads them on the host ends with SIGSEGV. Tasks use a second mapping beside them.
class Addresses {
 public:
  Addresses();
  bool is_device(const void* address) const;
  // Where a task finds what the device has at an address. Addresses of the host stay as they are.
  char* in_task(const void* address) const;
  // New addresses, never given twice.
  char* take(size_t size, size_t alignment);
  void give_up(char* start, size_t size);
  // Memory that may stand at several addresses.
  void show(char* start, const struct Physical& memory);
  void hide(char* start, size_t size);

 private:
  char* device_;
  char* tasks_;
  size_t next_;
};

// Memory made at the driver, wherever it is mapped: accesses by all its addresses are checked together.
struct Physical {
  size_t size;
  int file;
  History history;

  explicit Physical(size_t size);
  ~Physical();
};

struct Block {
  char* start;
  size_t size;
  int stream;   // whose memory it is
  bool pinned;  // memory of the host
  std::set<int> recorded;
  History history;
  std::optional<std::map<size_t, std::shared_ptr<Physical>>> mapped;  // of addresses reserved at the driver: by offset, what has memory
};

class Memory {
 public:
  Addresses addresses;
  std::map<char*, Block> blocks;
  std::vector<std::string> races;
  size_t capacity = size_t(1) << 32;
  size_t driver_bytes = 0;  // memory that was made at the driver
  size_t pinned = 0;       // bytes of the host
  size_t most_pinned = 0;  // more is refused

  Block* find(const void* address);
  bool is_pinned(const void* address);
  // An access: a race is noted, and the use of memory that is not there raises.
  void touch(Actor actor, char* low, char* high, bool writes, const std::string& operation);
  // An access of the host: of what is pinned of these bytes, however many pieces that was pinned in.
  void touch_pinned(char* low, char* high, bool writes, const std::string& operation);
  // As `touch`, of addresses alone, whatever memory stands there. Tells whether there was a race.
  bool touch_addresses(Actor actor, Block& block, char* low, char* high, bool writes, const std::string& operation);
  void note(const std::optional<std::string>& race, const std::string& what);
  // NaN for what is given back, in the order of the stream.
  void poison(int stream, char* start, size_t size);
};

Memory& memory();

// The runtime's last error of this thread: a refused registration leaves it, and the next launch raises and takes it.
inline thread_local int last_error = 0;

// What torch's allocator of the device has taken.
size_t reserved_bytes();

}  // namespace accelerator

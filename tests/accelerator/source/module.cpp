// The Python module `_accelerator`: what tests set and ask.
#include <torch/csrc/utils/pybind.h>

#include "allocators.h"
#include "generator.h"
#include "memory.h"
#include "operators.h"

using namespace accelerator;
namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;

  module.def("configure", [](double share, uint64_t seed, size_t capacity, size_t most_pinned) {
    scheduler().finish();
    scheduler().configure(share, seed);
    Lock lock(scheduler().state);
    memory().capacity = capacity;
    memory().most_pinned = most_pinned;
    memory().races.clear();
  }, py::arg("share"), py::arg("seed"), py::arg("capacity"), py::arg("most_pinned"), WithoutGil());
  module.def("finish", [] { scheduler().finish(); }, WithoutGil());
  module.def("fail", [](const std::string& name, int after) { scheduler().fail(name, after); });
  module.def("take_races", [] {
    Lock lock(scheduler().state);
    return std::exchange(memory().races, {});
  });
  module.def("take_waits", [] { return scheduler().take_waits(); });
  module.def("take_eager_operations", [] { return take_eager_operations(); });
  module.def("pending", [] { return scheduler().pending(); });
  module.def("run_one", [] { return scheduler().run_one(); }, WithoutGil());
  module.def("driver_bytes", [] {
    Lock lock(scheduler().state);
    return memory().driver_bytes;
  });
  module.def("register_host", [](size_t address, size_t size) {
    Lock lock(scheduler().state);
    char* start = reinterpret_cast<char*>(address);
    if (memory().pinned + size > memory().most_pinned || memory().find(start) || memory().find(start + size - 1)) {
      last_error = 2;
      return false;
    }
    memory().blocks.emplace(start, Block{start, size, 0, true, {}, {}, {}});
    memory().pinned += size;
    return true;
  });
  module.def("unregister_host", [](size_t address) {
    Lock lock(scheduler().state);
    char* start = reinterpret_cast<char*>(address);
    auto found = memory().blocks.find(start);
    if (found == memory().blocks.end() || !found->second.pinned) return false;
    memory().touch(kHost, start, start + found->second.size, true, "cudaHostUnregister");
    memory().pinned -= found->second.size;
    memory().blocks.erase(found);
    return true;
  });
  module.def("touch_host", [](size_t address, size_t size, bool writes, const std::string& operation) {
    char* start = reinterpret_cast<char*>(address);
    memory().touch_pinned(start, start + size, writes, operation);
  });
  module.def("pinned_bytes", [] {
    Lock lock(scheduler().state);
    return memory().pinned;
  });
  module.def("attach_out_of_memory_observer", [](py::object observer) {
    // Never let go of, as torch's are not.
    observe_out_of_memory([call = observer.release()](int64_t device, int64_t size, int64_t total, int64_t free) {
      py::gil_scoped_acquire gil;
      if (!PyObject_CallFunction(call.ptr(), "LLLL", device, size, total, free)) throw py::error_already_set();
    });
  });
  module.def("generator", [] { return default_generator(); });
  module.def("resize_storage", [](const at::Tensor& tensor, size_t size) { resize_storage(tensor.storage(), size); });
  module.def("observe_host", [] { return observe_host(); });
  module.def("unobserve_host", [](unsigned long number) { unobserve_host(number); });
}

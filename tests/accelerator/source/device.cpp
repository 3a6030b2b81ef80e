// What torch asks of a device: its guard, its hooks, its generator. Registered as CUDA's when the library is loaded.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "allocators.h"
#include "generator.h"
#include "memory.h"

namespace accelerator {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Event {
  MarkRef last;
};

Stream stream_number(int number) { return Stream(Stream::UNSAFE, Device(c10::kCUDA, 0), number); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device) const override { return {c10::kCUDA, 0}; }
  Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(Device device) const override { TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal"); }
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_number(current_stream()); }
  Stream getDefaultStream(Device) const override { return stream_number(0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device, int) const override { return stream_number(scheduler().add_stream()); }
  Stream exchangeStream(Stream stream) const override { return stream_number(exchange_stream(int(stream.id()))); }
  bool queryStream(const Stream& stream) const override {
    scheduler().raise_failure();
    return scheduler().is_idle(int(stream.id()));
  }
  void synchronizeStream(const Stream& stream) const override { scheduler().wait_for_stream(int(stream.id()), "stream"); }
  void synchronizeDevice(DeviceIndex) const override { scheduler().wait_for_all("device"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override { device_allocator().recordStream(data, stream); }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    scheduler().raise_failure();
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = scheduler().mark(int(stream.id()));
    scheduler().run_some();
  }
  void block(void* event, const Stream& stream) const override {
    scheduler().raise_failure();
    if (event) scheduler().make_wait(int(stream.id()), static_cast<Event*>(event)->last);
  }
  bool queryEvent(void* event) const override {
    scheduler().raise_failure();
    return !event || scheduler().has_passed(static_cast<Event*>(event)->last);
  }
  void synchronizeEvent(void* event) const override {
    if (event) scheduler().wait(static_cast<Event*>(event)->last, "event");
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return static_cast<Event*>(second)->last->time_ms - static_cast<Event*>(first)->last->time_ms;
  }
};

class Generator final : public at::CPUGeneratorImpl {
 public:
  Generator() : CPUGeneratorImpl(c10::detail::getNonDeterministicRandom()) {
    device_ = Device(c10::kCUDA, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, 0}; }
  bool isPinnedPtr(const void* address) const override { return memory().is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
};

struct Registered {
  Registered() {
    static Guard guard;
    c10::impl::device_guard_impl_registry[size_t(c10::kCUDA)].store(&guard);
    c10::SetAllocator(c10::kCUDA, &device_allocator());
    at::setHostAllocator(c10::kCUDA, &host_allocator());
  }
} registered;

}  // namespace

const at::Generator& default_generator() {
  static auto* instance = new at::Generator(at::make_generator<Generator>());
  return *instance;
}

at::Generator new_generator() { return at::make_generator<Generator>(); }

void with_device_generator(std::vector<c10::IValue>& arguments, const std::function<void()>& run) {
  at::Generator of_call = default_generator();
  for (auto& value : arguments) {
    if (!value.isGenerator()) continue;
    of_call = value.toGenerator();
    value = c10::IValue();
  }
  at::Generator of_cpu = at::detail::getDefaultCPUGenerator();
  const auto kept = of_cpu.get_state();
  of_cpu.set_state(of_call.get_state());
  auto exchange_back = [&] {
    of_call.set_state(of_cpu.get_state());
    of_cpu.set_state(kept);
  };
  try {
    run();
  } catch (...) {
    exchange_back();
    throw;
  }
  exchange_back();
}

void resize_storage(const c10::Storage& storage, size_t size) {
  c10::DataPtr data = size ? device_allocator().allocate(size) : c10::DataPtr(nullptr, Device(c10::kCUDA, 0));
  const size_t kept = std::min(size, storage.nbytes());
  if (kept) {
    char *to = static_cast<char*>(data.get()), *from = static_cast<char*>(const_cast<void*>(storage.data()));
    const Actor actor = actor_of(current_stream());
    scheduler().begin(current_stream());
    memory().touch(actor, from, from + kept, false, "resize_");
    memory().touch(actor, to, to + kept, true, "resize_");
    scheduler().enqueue(current_stream(), "resize_", [=] {
      memcpy(memory().addresses.in_task(to), memory().addresses.in_task(from), kept);
    });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

}  // namespace accelerator

namespace at {
using AcceleratorHooks = accelerator::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", AcceleratorHooks)
}  // namespace at

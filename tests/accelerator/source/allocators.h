// torch's allocators of the device and of pinned memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace accelerator {

c10::DeviceAllocator& device_allocator();
at::HostAllocator& host_allocator();

// The stream of this thread.
int current_stream();
int exchange_stream(int stream);

}  // namespace accelerator

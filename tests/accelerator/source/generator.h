// The device's random numbers: those of a generator of the CPU with a state of its own.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

namespace accelerator {

const at::Generator& default_generator();
at::Generator new_generator();

// Runs an operation that draws numbers: the CPU's generator has the state of the one in its arguments, or of the device's, for so long.
void with_device_generator(std::vector<c10::IValue>& arguments, const std::function<void()>& run);

// `untyped_storage().resize_()`.
void resize_storage(const c10::Storage& storage, size_t size);

}  // namespace accelerator

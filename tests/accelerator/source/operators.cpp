#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>

#include "allocators.h"
#include "generator.h"
#include "memory.h"
#include "without_autograd.h"

namespace accelerator {

void without_autograd(const std::function<void()>& run) {
  using c10::DispatchKey;
  constexpr auto above = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                         c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                                              DispatchKey::PythonDispatcher, DispatchKey::PreDispatch, DispatchKey::Functionalize,
                                              DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});
  c10::impl::ForceDispatchKeyGuard guard(c10::DispatchKeySet(DispatchKey::BackendSelect), above);
  run();
}

namespace {

using at::Tensor;
using c10::IValue;
using c10::ScalarType;

struct NoAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

std::map<std::string, int>& eager_operations() {
  static auto* instance = new std::map<std::string, int>;
  return *instance;
}

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// Tensors on the CPU over the same bytes, which own nothing. Those of one storage share one.
class Aliases {
 public:
  Tensor operator()(const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      void* start = storage->mutable_data();
      c10::DataPtr data(start ? memory().addresses.in_task(start) : nullptr, c10::Device(c10::kCPU));
      found = storages_.emplace(storage, c10::Storage(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), nullptr, false)).first;
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    return alias;
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

template <class Change>
IValue with_tensors(const IValue& value, c10::Device device, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      changed.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value.isDevice() ? IValue(device) : value;
}

template <class Visit>
void each_tensor(const IValue& value, Visit visit) {
  with_tensors(value, c10::kCPU, [&](const Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

// The bytes from the first element to the last, as if what lies between were used as well.
std::pair<char*, char*> extent(const Tensor& tensor) {
  char* low = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  if (!low || tensor.numel() == 0) return {nullptr, nullptr};
  low += tensor.storage_offset() * int64_t(tensor.itemsize());
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
  return {low, low + elements * int64_t(tensor.itemsize())};
}

void touch(Actor actor, const Tensor& tensor, bool writes, const std::string& operation) {
  const auto [low, high] = extent(tensor);
  memory().touch(actor, low, high, writes, operation);
}

Tensor empty_like_on_device(const Tensor& like) {
  return Tensor(at::detail::empty_strided_generic(like.sizes(), like.strides(), &device_allocator(),
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA), like.scalar_type()));
}

Tensor shape_of(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  return Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

// The operation gets what the host's tensor is now.
Tensor copy_of(const Tensor& tensor) {
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Where a kernel of CUDA takes what the CPU's does not, or gives what the CPU's leaves out.
void adapt_arguments(const std::string& name, std::vector<IValue>& values) {
  const bool layer = name == "aten::native_layer_norm_backward", group = name == "aten::native_group_norm_backward";
  if (layer || group) {  // CUDA keeps means and deviations in fp32; they came from the CPU's kernel in the type of its input
    const auto type = values[1].toTensor().scalar_type();
    const auto& weight = values[layer ? 5 : 4];
    if (weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != type) return;
    for (size_t i : {layer ? 3 : 2, layer ? 4 : 3}) values[i] = values[i].toTensor().to(type);
  }
  if (name == "aten::histc" && !values[0].toTensor().is_floating_point()) values[0] = values[0].toTensor().to(at::kFloat);
}

void put(const Tensor& to, const Tensor& result, const std::string& name) {
  if (!to.defined() || !result.defined()) return;
  if (result.numel() == 0 && to.numel() != 0) return;  // statistics of a batch norm that does not train
  TORCH_CHECK(to.sizes().equals(result.sizes()), "the shape that ", name, " has by its meta kernel differs: ", to.sizes(), ", not ", result.sizes());
  to.copy_(result);
}

// One call of an operation that no kernel of ours is registered for.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack* stack)
      : operation_(operation),
        schema_(operation.schema()),
        name_(schema_.name() + (schema_.overload_name().empty() ? "" : "." + schema_.overload_name())),
        stream_(current_stream()),
        arguments_(stack->end() - long(schema_.arguments().size()), stack->end()) {
    is_random_ = operation.hasTag(at::Tag::nondeterministic_seeded);
  }

  std::vector<IValue> run() {
    expect_one_device();
    const bool eager = is_random_ || operation_.hasTag(at::Tag::data_dependent_output) || !returns_tensors() || !find_shapes();
    if (eager) {
      Lock lock(scheduler().state);
      ++eager_operations()[name_];
    }
    scheduler().begin(stream_);
    take_aliases(eager);
    return eager ? run_now() : queue();
  }

 private:
  void expect_one_device() const {
    if (name_.find("index") != std::string::npos) return;  // indices may be the host's
    bool any = false;
    for (auto& value : arguments_) each_tensor(value, [&](const Tensor& tensor) { any |= on_device(tensor); });
    for (auto& value : arguments_) {
      each_tensor(value, [&](const Tensor& tensor) {
        TORCH_CHECK(!any || !tensor.is_cpu() || tensor.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0 (", name_, ")");
      });
    }
  }

  bool returns_tensors() const {
    bool only = true;
    for (auto& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      only &= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType || kind == c10::TypeKind::OptionalType;
      TORCH_CHECK(!result.alias_info() || result.alias_info()->isWrite(), "the test accelerator has no kernel for the view ", name_);
    }
    return only;
  }

  // All that may decide the shapes of the results; empty where values of the host may, too.
  std::string what_decides_shapes() const {
    std::ostringstream all;
    all << name_ << c10::get_default_dtype_as_scalartype();
    bool is_all = true;
    for (auto& value : arguments_) {
      all << ';' << value.tagKind();
      is_all &= !value.isOptionalTensorList();
      if (!value.isTensor() && !value.isTensorList()) all << value;
      each_tensor(value, [&](const Tensor& tensor) {
        is_all &= on_device(tensor) || tensor.unsafeGetTensorImpl()->is_wrapped_number();
        all << ';' << tensor.device().type() << tensor.scalar_type() << tensor.sizes() << tensor.strides();
      });
    }
    return is_all ? all.str() : "";
  }

  // Runs the operation on tensors without data. False where its shapes depend on data or nobody has written them down.
  // They are kept: the kernels that find them are written in Python, and take longer than the operations themselves.
  bool find_shapes() try {
    static auto* known = new std::unordered_map<std::string, std::vector<IValue>>;
    const auto key = what_decides_shapes();
    bool is_resized = false;
    {
      Lock lock(scheduler().state);
      if (auto found = known->find(key); found != known->end()) {
        shapes_ = found->second;
        return true;
      }
    }
    for (auto& value : arguments_) shapes_.push_back(with_tensors(value, c10::Device(c10::kMeta), shape_of));
    auto before = shapes_;
    operation_.callBoxed(&shapes_);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!writes(schema_.arguments()[i]) || !arguments_[i].isTensor()) continue;
      const Tensor &tensor = arguments_[i].toTensor(), &shape = before[i].toTensor();
      if (tensor.sizes().equals(shape.sizes())) continue;
      is_resized = true;
      tensor.resize_(shape.sizes());
    }
    Lock lock(scheduler().state);
    if (!key.empty() && !is_resized) known->emplace(key, shapes_);
    return true;
  } catch (const std::exception&) {
    return false;
  }

  void take_aliases(bool eager) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool is_written = writes(schema_.arguments()[i]);
      inputs_.push_back(with_tensors(arguments_[i], c10::Device(c10::kCPU), [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (!on_device(tensor)) return eager ? tensor : copy_of(tensor);
        touch(actor_of(stream_), tensor, is_written, name_);
        return aliases_(tensor);
      }));
    }
  }

  // What is returned is an argument that is written: that one.
  const IValue* returned_argument(size_t number) const {
    const auto* returned = schema_.returns()[number].alias_info();
    if (!returned) return nullptr;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* given = schema_.arguments()[i].alias_info();
      if (given && (*given == *returned || given->beforeSets() == returned->beforeSets())) return &arguments_[i];
    }
    return nullptr;
  }

  std::vector<IValue> queue() {
    std::vector<IValue> results;
    auto targets = std::make_shared<std::vector<IValue>>();
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      if (const auto* argument = returned_argument(i)) {
        results.push_back(*argument);
        targets->push_back(IValue());
        continue;
      }
      results.push_back(with_tensors(shapes_[i], c10::Device(c10::kCUDA, 0), [](const Tensor& tensor) {
        return tensor.defined() ? empty_like_on_device(tensor) : tensor;
      }));
      each_tensor(results.back(), [&](const Tensor& tensor) { touch(actor_of(stream_), tensor, true, name_); });
      targets->push_back(with_tensors(results.back(), c10::Device(c10::kCPU), [&](const Tensor& tensor) {
        return tensor.defined() ? aliases_(tensor) : tensor;
      }));
    }
    auto inputs = std::make_shared<std::vector<IValue>>(std::move(inputs_));
    scheduler().enqueue(stream_, name_, [operation = operation_, inputs, targets, name = name_] {
      auto values = *inputs;
      adapt_arguments(name, values);
      operation.callBoxed(&values);
      for (size_t i = 0; i < values.size(); ++i) {
        const auto& target = (*targets)[i];
        if (target.isTensor()) {
          put(target.toTensor(), values[i].toTensor(), name);
        } else if (!target.isNone()) {
          const auto to = target.toTensorVector(), from = values[i].toTensorVector();
          for (size_t k = 0; k < to.size(); ++k) put(to[k], from[k], name);
        }
      }
    });
    return results;
  }

  // After all that is queued on the stream. A device would not wait here, so nobody is told.
  std::vector<IValue> run_now() {
    scheduler().run_stream(stream_);
    auto values = inputs_;
    adapt_arguments(name_, values);
    if (is_random_) {
      with_device_generator(values, [&] { operation_.callBoxed(&values); });
    } else {
      operation_.callBoxed(&values);
    }
    std::vector<IValue> results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      if (const auto* argument = returned_argument(i)) {
        results.push_back(*argument);
        continue;
      }
      results.push_back(with_tensors(values[i], c10::Device(c10::kCUDA, 0), [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        auto result = empty_like_on_device(tensor);
        auto to = aliases_(result), from = tensor;
        scheduler().enqueue(stream_, name_, [to, from] { to.copy_(from); });
        touch(actor_of(stream_), result, true, name_);
        return result;
      }));
    }
    return results;
  }

  const c10::OperatorHandle& operation_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const int stream_;
  const std::vector<IValue> arguments_;
  bool is_random_;
  std::vector<IValue> shapes_, inputs_;
  Aliases aliases_;
};

void call(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  scheduler().raise_failure();
  if (std::exchange(last_error, 0)) throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 2, "CUDA error: out of memory, of an earlier call");
  NoAutograd no_autograd;
  auto results = Call(operation, stack).run();
  stack->erase(stack->end() - long(operation.schema().arguments().size()), stack->end());
  for (auto& result : results) stack->push_back(std::move(result));
  scheduler().run_some();
}

bool is_pinned(const Tensor& tensor) { return tensor.storage().data() && memory().is_pinned(tensor.storage().data()); }

void record_on(const Tensor& tensor, int stream) {
  host_allocator().record_event(tensor.storage().mutable_data(), nullptr, c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, 0), stream));
}

// As CUDA has it: from memory that is not pinned the host's thread copies first, and into it the host waits.
Tensor copy_between(const Tensor& from, const Tensor& to, bool non_blocking) {
  NoAutograd no_autograd;
  const int stream = current_stream();
  scheduler().begin(stream);
  Aliases aliases;
  bool waits = false;
  Tensor source, target;
  if (from.is_cpu() && !(is_pinned(from) && from.scalar_type() == to.scalar_type())) {
    source = from.detach().clone();
    waits = !non_blocking;
  } else {
    source = aliases(from);
    touch(actor_of(stream), from, false, "copy_");
    if (from.is_cpu()) {
      waits = !non_blocking;
      record_on(from, stream);
    }
  }
  target = aliases(to);
  if (!to.is_cpu()) {
    touch(actor_of(stream), to, true, "copy_");
  } else if (is_pinned(to)) {
    waits = !non_blocking;
    touch(actor_of(stream), to, true, "copy_");
    if (non_blocking) record_on(to, stream);
  } else {
    waits = true;
  }
  scheduler().raise_failure();
  scheduler().enqueue(stream, "copy_", [source, target] { target.copy_(source); });
  if (waits) {
    scheduler().wait_for_stream(stream, "copy_");
  } else {
    scheduler().run_some();
  }
  return to;
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  copy_between(from.sizes().equals(to.sizes()) ? from : from.expand_as(to), to, non_blocking);
  return to;
}

const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  int64_t elements = tensor.storage_offset();
  int64_t count = 1;
  for (auto length : size) count *= length;
  const size_t needed = size_t(elements + count) * tensor.itemsize();
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

c10::Scalar item(const Tensor& tensor) {
  NoAutograd no_autograd;
  scheduler().begin(current_stream());
  touch(actor_of(current_stream()), tensor, false, "item");
  scheduler().wait_for_stream(current_stream(), "item");
  return Aliases()(tensor).item();
}

Tensor empty(c10::IntArrayRef size, std::optional<ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only dense CPU tensors can be pinned");
  return Tensor(at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

void record_stream(Tensor& tensor, c10::Stream stream) { device_allocator().recordStream(tensor.storage().data_ptr(), stream); }
Tensor& set_storage(Tensor& tensor, c10::Storage storage) { return at::native::set_(tensor, std::move(storage)); }
Tensor& set_tensor(Tensor& tensor, const Tensor& other) { return at::native::set_tensor_(tensor, other); }

// Operations of the host on pinned memory, with no tensor of the device among their arguments.
std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
  static const std::set<std::string> without_data = {
      "aten::is_pinned", "aten::_pin_memory", "aten::empty_like", "aten::size", "aten::record_stream", "aten::set_", "aten::resize_",
      "aten::requires_grad_", "aten::is_same_size", "aten::detach_", "aten::_to_copy", "aten::to", "aten::new_empty", "aten::new_empty_strided", "aten::empty_strided"};
  const auto schema = function.operator_schema();
  const auto inputs = function.inputs();
  if (scheduler().in_task() || !schema || inputs.size() > schema->arguments().size()) return nullptr;
  bool any = without_data.count(schema->name());
  for (auto& value : inputs) each_tensor(value, [&](const Tensor& tensor) { any |= on_device(tensor); });
  for (auto& result : schema->returns()) any |= result.alias_info() && !result.alias_info()->isWrite();  // a view
  if (any) return nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    each_tensor(inputs[i], [&](const Tensor& tensor) {
      if (!tensor.is_cpu() || !tensor.has_storage()) return;
      const auto [low, high] = extent(tensor);
      memory().touch_pinned(low, high, writes(schema->arguments()[i]), schema->name());
    });
  }
  return nullptr;
}

// The cell of an LSTM, which CUDA has as one operation and the CPU has not.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_state, const Tensor& before, const std::optional<Tensor>& input_bias, const std::optional<Tensor>& state_bias) {
  Tensor gates = from_input + from_state;
  for (const auto& bias : {input_bias, state_bias}) {
    if (bias && bias->defined()) gates = gates + *bias;
  }
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor after = forget * before + in * cell;
  return {out * after.tanh(), after, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& of_state, const std::optional<Tensor>& of_cell, const Tensor& before, const Tensor& after, const Tensor& kept, bool has_bias) {
  const auto parts = kept.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const Tensor shown = after.tanh();
  Tensor grad_cell = of_cell && of_cell->defined() ? *of_cell : at::zeros_like(after), grad_out = at::zeros_like(out);
  if (of_state && of_state->defined()) {
    grad_cell = grad_cell + *of_state * out * (1 - shown * shown);
    grad_out = *of_state * shown;
  }
  const Tensor gates = at::cat({grad_cell * cell * in * (1 - in), grad_cell * before * forget * (1 - forget),
                                grad_cell * in * (1 - cell * cell), grad_out * out * (1 - out)}, 1);
  return {gates, grad_cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&call>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("view.dtype", at::native::view_dtype);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  // Their composite kernels win over the fallback, and have other bits than the CPU's.
  for (auto name : {"native_layer_norm", "native_group_norm", "_stack"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call>());
  }
}

}  // namespace

std::map<std::string, int> take_eager_operations() {
  Lock lock(scheduler().state);
  return std::exchange(eager_operations(), {});
}

unsigned long observe_host() {
  return at::addGlobalCallback(at::RecordFunctionCallback(&see).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void unobserve_host(unsigned long number) { at::removeCallback(number); }

}  // namespace accelerator

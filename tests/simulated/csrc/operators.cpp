// Operators of the simulated devices: the CPU's own kernels over lent tensors, so results are equal bit for bit.
#include "lending.h"
#include "memory.h"
#include "order.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

namespace acc {
namespace {

// ---- hooks: Python behaviours before and after an operator runs -------------------------------------------------

struct Watched {
  std::mutex mutex;
  std::atomic<bool> any{false};
  std::unordered_set<std::string> before;
  std::unordered_set<std::string> after;
};

Watched& watched() {
  static auto* instance = new Watched();
  return *instance;
}

thread_local bool inside_hook = false;

bool is_watched(const std::unordered_set<std::string>& names, const std::string& name) {
  std::lock_guard<std::mutex> lock(watched().mutex);
  return !inside_hook && names.count(name) != 0;
}

// The Python side is an operator itself (simulated::before, simulated::after): torch converts the arguments,
// takes the interpreter lock and carries exceptions, so nothing here includes Python.h.
void call_python(const char* hook, const std::string& name, std::vector<torch::jit::Stack> groups) {
  torch::jit::Stack stack{name};
  for (const auto& group : groups) {
    c10::impl::GenericList values(c10::AnyType::get());
    for (const auto& value : group) {
      values.push_back(value);
    }
    stack.emplace_back(values);
  }
  inside_hook = true;
  try {
    c10::Dispatcher::singleton().findSchemaOrThrow(hook, "").callBoxed(stack);
  } catch (...) {
    inside_hook = false;
    throw;
  }
  inside_hook = false;
}

// ---- the boxed kernel -------------------------------------------------------------------------------------------

// Libraries whose CPU kernels stand for this device's own. Others must register for the device, as on real hardware.
bool has_host_kernels(const std::string& name) {
  for (const char* library : {"aten::", "prims::", "rngprims::", "torchvision::"}) {
    if (name.rfind(library, 0) == 0) {
      return true;
    }
  }
  return false;
}

Mixing mixing_of(const std::string& name) {
  static const std::unordered_set<std::string> indexed{
      "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  if (name == "aten::copy_") {
    return Mixing::free;
  }
  return indexed.count(name) != 0 ? Mixing::indices : Mixing::none;
}

void book_transfers(const std::string& name, const torch::jit::Stack& arguments) {
  if (name == "aten::copy_") {
    const auto& target = arguments[0].toTensor();
    book_copy(arguments[1].toTensor().device(), target.device(), target.numel() * target.element_size());
  } else if (name == "aten::_local_scalar_dense") {
    const auto& source = arguments[0].toTensor();
    book_copy(source.device(), c10::Device(c10::DeviceType::CPU), source.element_size());
  }
}

// A driver that zeroes floats of 16 bits between host and device: one flag per dtype and direction. Each copy ends here
// or in _local_scalar_dense, whatever it was called as; integers of the same bits are left alone.
enum Zeroed { kBFloat16 = 1, kHalf = 2, kToHost = 4, kToDevice = 8 };
std::atomic<int> zeroed_kinds{0};
std::atomic<int64_t> zeroed_copies{0};

bool is_zeroed(at::ScalarType type) {
  return (zeroed_kinds & kBFloat16 && type == at::kBFloat16) || (zeroed_kinds & kHalf && type == at::kHalf);
}

void zero_copies(const std::string& name, const torch::jit::Stack& arguments, torch::jit::Stack* stack) {
  if (name == "aten::copy_") {
    const auto& target = arguments[0].toTensor();
    const auto& source = arguments[1].toTensor();
    const bool leaves = source.device().type() == kType && target.device().is_cpu();
    const bool arrives = source.device().is_cpu() && target.device().type() == kType;
    const bool travels = (leaves && zeroed_kinds & kToHost) || (arrives && zeroed_kinds & kToDevice);
    if (travels && target.numel() > 0 && (is_zeroed(source.scalar_type()) || is_zeroed(target.scalar_type()))) {
      ++zeroed_copies;
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      target.zero_();
    }
  } else if (name == "aten::_local_scalar_dense" && zeroed_kinds & kToHost) {
    if (is_zeroed(arguments[0].toTensor().scalar_type())) {
      ++zeroed_copies;
      stack->back() = at::Scalar(0.0);
    }
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_host_kernels(name) && op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "Could not run '",
      op.operator_name(), "' with arguments from the 'acc' backend: no kernel is registered for it.");
  const torch::jit::Stack arguments(stack->end() - op.schema().arguments().size(), stack->end());
  const bool any_watched = watched().any.load(std::memory_order_relaxed);
  if (any_watched && is_watched(watched().before, name)) {
    call_python("simulated::before", name, {arguments});
  }
  const bool clocked = clock_is_on();
  if (clocked) {
    check_order(op, arguments);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Lending lending(op, *stack, mixing_of(name));
    lending.lend();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    lending.settle();
  }
  if (zeroed_kinds.load(std::memory_order_relaxed) != 0) {
    zero_copies(name, arguments, stack);
  }
  if (clocked) {
    note_results(torch::jit::Stack(stack->end() - op.schema().returns().size(), stack->end()));
  }
  book_transfers(name, arguments);
  if (any_watched && is_watched(watched().after, name)) {
    const torch::jit::Stack results(stack->end() - op.schema().returns().size(), stack->end());
    call_python("simulated::after", name, {arguments, results});
  }
}

// ---- operators that make or share memory --------------------------------------------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_from(std::optional<c10::Device> device) {
  return {kType, existing(device.has_value() ? device->index() : -1)};
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kStrided) == c10::kStrided, "acc tensors are strided, found ", *layout);
  const c10::DeviceGuard guard(device_from(device));
  return at::detail::empty_generic(
      size, device_allocator(), kKeys, dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_from(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), kKeys, dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::DeviceGuard guard(tensor.device());
  return at::native::set_storage_cpu_(tensor, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(source), 0, {length}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& tensor) {
  return set_tensor(tensor, empty({0}, tensor.scalar_type(), {}, tensor.device(), {}, {}));
}

// Torch lists the devices whose tensors may trade places in `parameter.data = tensor`; a plug-in has to say so itself.
// XLA's are not listed: `parameter.data` of one device refuses tensors of the other there.
std::atomic<bool> set_data_refused{false};

bool may_swap_data(const at::Tensor& target, const at::Tensor& source) {
  return source.layout() == c10::kStrided && !(set_data_refused && source.device().type() != target.device().type());
}

void keep_for_stream(at::Tensor&, c10::Stream) {}

// Attention chooses its kernel through a stub, not an operator: ask the CPU's chooser by way of the operator.
int64_t attention_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool grouped) {
  return at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, grouped);
}

} // namespace
} // namespace acc

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &acc::attention_choice)
} // namespace at::native

namespace acc {
namespace {

// Every operator with a CPU kernel runs it whole: a decomposition would give other roundings than the CPU gives.
void register_host_kernels() {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static const std::unordered_set<std::string> decomposed_elsewhere{
      "aten::convolution", "aten::convolution_backward", "aten::copy_"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const bool whole = decomposed_elsewhere.count(name.name) != 0 && name.overload_name.empty();
    if (whole || op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

TORCH_LIBRARY(simulated, m) {
  m.def("before(str op, Any[] arguments) -> ()");
  m.def("after(str op, Any[] arguments, Any[] results) -> ()");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_has_compatible_shallow_copy_type", &may_swap_data);
  m.impl("record_stream", &keep_for_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

const bool host_kernels_registered = [] {
  register_host_kernels();
  return true;
}();

} // namespace
} // namespace acc

// Plain C entry points for ctypes.
extern "C" void acc_refuse_set_data(int on) {
  acc::set_data_refused = on != 0;
}

extern "C" void acc_zero_copies(int kinds) {
  acc::zeroed_kinds = kinds;
  acc::zeroed_copies = 0;
}

extern "C" int64_t acc_zeroed_copies() {
  return acc::zeroed_copies;
}

// The operators to report to Python, as newline-separated names.
extern "C" void acc_watch(const char* before, const char* after) {
  const auto split = [](const std::string& text) {
    std::unordered_set<std::string> names;
    for (size_t start = 0; start < text.size();) {
      const auto end = std::min(text.find('\n', start), text.size());
      names.insert(text.substr(start, end - start));
      start = end + 1;
    }
    return names;
  };
  auto& table = acc::watched();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.before = split(before);
  table.after = split(after);
  table.any = !table.before.empty() || !table.after.empty();
}

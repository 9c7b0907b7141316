#include "lending.h"

#include "memory.h"
#include "runtime.h"

#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

namespace acc {
namespace {

bool is_simulated(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_generator(const c10::Argument& argument) {
  static const auto optional = c10::OptionalType::create(c10::GeneratorType::get());
  return *argument.real_type() == *optional || argument.real_type()->kind() == c10::TypeKind::GeneratorType;
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor(), false);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) {
        visit(element.toTensor(), true);
      }
    }
  }
}

// The same bytes under the CPU's name. Resizable, so that kernels which grow their output work.
c10::Storage host_view(const c10::Storage& storage) {
  auto* data = const_cast<void*>(storage.data());
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(data, nullptr, [](void*) {}, c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(), true);
}

void copy_geometry(const at::Tensor& source, const at::Tensor& target) {
  target.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
}

c10::DispatchKeySet marks_of(const at::Tensor& tensor) {
  c10::DispatchKeySet marks;
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}) {
    if (tensor.key_set().has(key)) {
      marks = marks.add(key);
    }
  }
  return marks;
}

} // namespace

Lending::Lending(const c10::OperatorHandle& op, torch::jit::Stack& stack, Mixing mixing)
    : op_(op), stack_(stack), mixing_(mixing), first_argument_(stack.size() - op.schema().arguments().size()) {}

void Lending::check(const at::Tensor& tensor, size_t position, bool in_list) {
  if (!tensor.defined() || tensor.device().type() == c10::DeviceType::Meta) {
    return;
  }
  const auto& argument = op_.schema().arguments()[position];
  const bool on_host = tensor.device().is_cpu();
  if (on_host && !is_written(argument) && (tensor.dim() == 0 || (in_list && mixing_ == Mixing::indices))) {
    return;
  }
  if (!device_.has_value()) {
    device_ = tensor.device();
  }
  TORCH_CHECK(
      *device_ == tensor.device() || !in_list || mixing_ != Mixing::indices,
      "indices should be either on cpu or on the same device as the indexed tensor (", *device_, ")");
  TORCH_CHECK(
      mixing_ == Mixing::free || *device_ == tensor.device(),
      "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
      tensor.device(), "! (when checking argument for argument ", argument.name(), " in method ",
      op_.operator_name().name, ")");
}

void Lending::lend() {
  const auto& arguments = op_.schema().arguments();
  for (size_t position = 0; position < arguments.size(); ++position) {
    for_each_tensor(stack_[first_argument_ + position], [&](const at::Tensor& tensor, bool in_list) {
      check(tensor, position, in_list);
    });
  }
  for (size_t position = 0; position < arguments.size(); ++position) {
    auto& value = stack_[first_argument_ + position];
    if (value.isDevice() && value.toDevice().type() == kType) {
      device_ = c10::Device(kType, existing(value.toDevice().index()));
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  if (!device_.has_value()) {
    device_ = c10::Device(kType, current_device());
  }
  for (size_t position = 0; position < arguments.size(); ++position) {
    auto& value = stack_[first_argument_ + position];
    if (is_generator(arguments[position]) && device_->type() == kType) {
      value = host_generator(value.toOptional<at::Generator>(), *device_);
    } else {
      change_tensors(value, [&](const at::Tensor& tensor) { return lent(tensor); });
    }
  }
}

template <typename Change>
void Lending::change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    value = changed;
  }
}

at::Tensor Lending::lent(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) {
    untouched_.push_back(tensor);
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided, op_.operator_name().name, ": acc tensors are strided, found ", tensor.layout());
  for (const auto& loan : loans_) {
    if (loan.device.is_same(tensor)) {
      return loan.host;
    }
  }
  const Pair* pair = nullptr;
  for (const auto& known : pairs_) {
    if (known.device.is_alias_of(tensor.storage())) {
      pair = &known;
    }
  }
  if (pair == nullptr) {
    pairs_.push_back({tensor.storage(), host_view(tensor.storage()), tensor.storage().data(), tensor});
    pair = &pairs_.back();
  }
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(pair->host), c10::DispatchKeySet(c10::DispatchKey::CPU) | marks_of(tensor), tensor.dtype());
  copy_geometry(tensor, host);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    host.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  loans_.push_back({tensor, host});
  return host;
}

Lending::Pair& Lending::pair_of(const c10::Storage& host) {
  for (auto& pair : pairs_) {
    if (pair.host.is_alias_of(host)) {
      return pair;
    }
  }
  c10::Storage device = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), host.nbytes(), adopt(device_->index(), host), device_allocator(), true);
  pairs_.push_back({device, host, host.data(), at::Tensor()});
  return pairs_.back();
}

at::Tensor Lending::owned(const at::Tensor& host) {
  if (!host.defined() || !host.device().is_cpu() || device_->type() != kType) {
    return host;
  }
  for (const auto& loan : loans_) {
    if (loan.host.is_same(host)) {
      return loan.device;
    }
  }
  for (const auto& tensor : untouched_) {
    if (tensor.is_same(host)) {
      return host;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      host.layout() == c10::kStrided, op_.operator_name().name, ": results on acc are strided, found ", host.layout());
  auto& pair = pair_of(host.storage());
  at::Tensor device;
  if (pair.first.defined()) { // a view of an argument, or a second result over the same storage
    device = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(pair.device), pair.first.key_set(), host.dtype());
  } else {
    device = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(pair.device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | marks_of(host), host.dtype());
    pair.first = device;
  }
  copy_geometry(host, device);
  return device;
}

void Lending::settle() {
  for (auto& pair : pairs_) {
    if (pair.host.data() != pair.data) { // the kernel allocated: an output was resized
      auto* grown = pair.device.unsafeGetStorageImpl();
      grown->set_data_ptr_noswap(adopt(pair.device.device().index(), pair.host));
      grown->set_nbytes(pair.host.nbytes());
      pair.data = pair.host.data();
    }
  }
  for (auto& loan : loans_) {
    if (loan.device.sizes() != loan.host.sizes() || loan.device.strides() != loan.host.strides() ||
        loan.device.storage_offset() != loan.host.storage_offset()) {
      copy_geometry(loan.host, loan.device);
    }
  }
  for (size_t position = stack_.size() - op_.schema().returns().size(); position < stack_.size(); ++position) {
    change_tensors(stack_[position], [&](const at::Tensor& host) { return owned(host); });
  }
}

} // namespace acc

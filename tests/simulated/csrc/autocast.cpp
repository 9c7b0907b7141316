// torch.autocast("acc"): CUDA's operator lists and policies, as boxed kernels.
#include "memory.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>

namespace acc {
namespace {

#define AS_TEXT(...) #__VA_ARGS__,
constexpr const char* kLowerPrecision[] = {AT_FORALL_LOWER_PRECISION_FP(AS_TEXT)};
constexpr const char* kFloat32[] = {AT_FORALL_FP32(AS_TEXT) "norm, Scalar", "norm, ScalarOpt_dim"};
constexpr const char* kFloat32Result[] = {AT_FORALL_FP32_SET_OPT_DTYPE(AS_TEXT)};
constexpr const char* kWidest[] = {AT_FORALL_PROMOTE(AS_TEXT)};
#undef AS_TEXT

bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType && tensor.is_floating_point() &&
      tensor.scalar_type() != at::kDouble;
}

template <typename Visit>
void for_each_tensor(const torch::jit::Stack& stack, size_t count, const Visit& visit) {
  for (size_t position = stack.size() - count; position < stack.size(); ++position) {
    const auto& value = stack[position];
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        visit(tensor);
      }
    }
  }
}

void cast(torch::jit::Stack& stack, size_t count, at::ScalarType dtype) {
  for (size_t position = stack.size() - count; position < stack.size(); ++position) {
    auto& value = stack[position];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), kType);
    } else if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      value = at::autocast::cached_cast(dtype, at::TensorList(tensors), kType);
    }
  }
}

void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  cast(*stack, op.schema().arguments().size(), at::autocast::get_autocast_dtype(kType));
  op.callBoxed(stack);
}

void float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  cast(*stack, op.schema().arguments().size(), at::kFloat);
  op.callBoxed(stack);
}

// Float32 as the result's dtype, unless the caller chose one.
void float32_result(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto count = op.schema().arguments().size();
  const auto dtype = op.schema().argumentIndexWithName("dtype");
  auto& chosen = (*stack)[stack->size() - count + dtype.value()];
  if (chosen.isNone() && is_eligible((*stack)[stack->size() - count].toTensor())) {
    chosen = at::kFloat;
  }
  op.callBoxed(stack);
}

void widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto count = op.schema().arguments().size();
  auto dtype = at::autocast::get_autocast_dtype(kType);
  for_each_tensor(*stack, count, [&](const at::Tensor& tensor) {
    if (is_eligible(tensor) && tensor.scalar_type() == at::kFloat) {
      dtype = at::kFloat;
    }
  });
  cast(*stack, count, dtype);
  op.callBoxed(stack);
}

std::string operator_name(std::string text) { // "conv_transpose2d, input" is aten::conv_transpose2d.input
  const auto comma = text.find(", ");
  return comma == std::string::npos ? text : text.replace(comma, 2, ".");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* text : kLowerPrecision) {
    m.impl(operator_name(text).c_str(), torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
  }
  for (const char* text : kFloat32) {
    m.impl(operator_name(text).c_str(), torch::CppFunction::makeFromBoxedFunction<&float32>());
  }
  for (const char* text : kFloat32Result) {
    m.impl(operator_name(text).c_str(), torch::CppFunction::makeFromBoxedFunction<&float32_result>());
  }
  for (const char* text : kWidest) {
    m.impl(operator_name(text).c_str(), torch::CppFunction::makeFromBoxedFunction<&widest>());
  }
}

} // namespace
} // namespace acc

// One operator call: device tensors are lent to the CPU kernel as CPU tensors over the same bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace acc {

// What an operator allows beyond "all tensors on one device".
enum class Mixing {
  none,    // only zero-dimensional CPU tensors that are read may join
  indices, // tensors inside a list may also stay on the CPU (x[index])
  free,    // copies between devices
};

class Lending {
 public:
  Lending(const c10::OperatorHandle& op, torch::jit::Stack& stack, Mixing mixing);

  // Replaces the arguments on the stack by what a CPU kernel accepts.
  void lend();

  // After the kernel: storages that grew and shapes that changed go back to the device tensors,
  // and results on the stack become device tensors. Raises torch.OutOfMemoryError above the capacity.
  void settle();

 private:
  struct Loan {
    at::Tensor device;
    at::Tensor host;
  };
  struct Pair {
    c10::Storage device;
    c10::Storage host;
    const void* data;
    at::Tensor first;
  };

  void check(const at::Tensor& tensor, size_t position, bool in_list);
  at::Tensor lent(const at::Tensor& tensor);
  at::Tensor owned(const at::Tensor& host);
  Pair& pair_of(const c10::Storage& host);
  template <typename Change>
  void change_tensors(c10::IValue& value, const Change& change);

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  Mixing mixing_;
  size_t first_argument_;
  std::optional<c10::Device> device_;
  std::vector<Loan> loans_;
  std::vector<Pair> pairs_;
  std::vector<at::Tensor> untouched_;
};

} // namespace acc

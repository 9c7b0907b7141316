// What comes before what on the streams of the simulated devices, and when, while a clock is on.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>

namespace acc {

// A point on a stream: when it is reached, and up to which operation of each stream everything has ended by then.
struct Moment {
  double seconds = 0;
  std::map<int64_t, int64_t> ended;
};

bool clock_is_on();

Moment moment_of(const c10::Stream& stream);
void wait_for(const c10::Stream& stream, const Moment& moment); // the stream goes on after the moment
void host_waits_for(const Moment& moment);

// Raises when a device tensor is used before the stream that wrote it is known to be done, or is written while another
// stream may still use it, or lies in memory that another stream may still use.
void check_order(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);
void note_results(const torch::jit::Stack& results);

// Memory of a device that begins at `data` was handed out, or given back.
void note_memory(const void* data, c10::DeviceIndex index);
void forget_memory(const void* data);

} // namespace acc

// Generators of the simulated devices, as the operators need them.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace acc {

// The host generator behind a device generator; the device's default one when none was given.
// Raises when the generator belongs to another kind of device.
at::Generator host_generator(const std::optional<at::Generator>& generator, c10::Device device);

} // namespace acc

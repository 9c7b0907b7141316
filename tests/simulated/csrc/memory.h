// The memory of the simulated devices: host memory that is counted, and limited, per device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace acc {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDeviceCount = 2;

// The rows of the ledger of one device; accelerator.py reads them in this order.
enum Entry : int {
  kAllocatedBytes,
  kPeakBytes,
  kCapacityBytes,
  kAllocations,
  kRefusals,
  kToDeviceBytes,
  kToDeviceCopies,
  kToHostBytes,
  kToHostCopies,
  kPeerBytes,
  kPeerCopies,
  kEntries,
};

// The index itself, or the current device for -1. Raises when there is no such device.
c10::DeviceIndex existing(c10::DeviceIndex index);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// Books one copy of `bytes` between two devices, at least one of which is simulated.
void book_copy(c10::Device source, c10::Device target, int64_t bytes);

// The bytes of a host storage as memory of a device: no copy, charged to the device until freed.
// Raises torch.OutOfMemoryError above the device's capacity.
c10::DataPtr adopt(c10::DeviceIndex index, const c10::Storage& host);

c10::DeviceAllocator* device_allocator();

// Page-locked memory is ordinary host memory whose addresses are remembered; torch asks for the start of a storage.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* storage_start);

} // namespace acc

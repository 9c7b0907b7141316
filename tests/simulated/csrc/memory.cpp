#include "memory.h"

#include "order.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_set>

namespace acc {
namespace {

constexpr int64_t kUnlimitedBytes = int64_t{1} << 40;

using Row = std::array<int64_t, kEntries>;

struct Ledger {
  std::mutex mutex;
  std::array<Row, kDeviceCount> rows{};
  std::array<int64_t, kDeviceCount> until_refusal{};  // requests until one is refused whatever is free; 0 for never
  int64_t buffer_bytes = 0;  // the largest request that is granted, 0 for any
  bool ends_process = false;  // whether a larger one ends the process
  std::string words;  // what a shortage is called, in a plain RuntimeError; empty for torch's own error
  std::unordered_set<const void*> pinned;

  Ledger() {
    for (auto& row : rows) {
      row[kCapacityBytes] = kUnlimitedBytes;
    }
  }
};

// Never destroyed: tensors may outlive static destruction at interpreter exit.
Ledger& ledger() {
  static auto* instance = new Ledger();
  return *instance;
}

std::string readable(int64_t bytes) {
  const char* unit = bytes >= (1 << 30) ? "GiB" : bytes >= (1 << 20) ? "MiB" : bytes >= (1 << 10) ? "KiB" : "bytes";
  const double divisor = bytes >= (1 << 30) ? 1 << 30 : bytes >= (1 << 20) ? 1 << 20 : bytes >= (1 << 10) ? 1 << 10 : 1;
  char text[64];
  std::snprintf(text, sizeof text, divisor == 1 ? "%.0f %s" : "%.2f %s", static_cast<double>(bytes) / divisor, unit);
  return text;
}

void charge(c10::DeviceIndex index, int64_t bytes) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  auto& row = ledger().rows[index];
  const int64_t free = row[kCapacityBytes] - row[kAllocatedBytes];
  auto& until = ledger().until_refusal[index];
  const bool refused = until > 0 && --until == 0;
  if (ledger().buffer_bytes > 0 && bytes > ledger().buffer_bytes) {
    if (ledger().ends_process) {
      std::fprintf(stderr, "failed assertion: total bytes of NDArray > %lld\n", (long long)ledger().buffer_bytes);
      std::abort();
    }
    ++row[kRefusals];
    TORCH_CHECK(false, "Invalid buffer size: ", readable(bytes));
  }
  if (refused || (bytes > 0 && bytes > free)) {
    ++row[kRefusals];
    TORCH_CHECK(ledger().words.empty(), ledger().words);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "acc out of memory. Tried to allocate ", readable(bytes), ". acc:", int(index),
        " has a total capacity of ", readable(row[kCapacityBytes]), " of which ", readable(free > 0 ? free : 0),
        " is free. Of the allocated memory ", readable(row[kAllocatedBytes]), " is allocated by PyTorch.");
  }
  row[kAllocatedBytes] += bytes;
  row[kPeakBytes] = std::max(row[kPeakBytes], row[kAllocatedBytes]);
  ++row[kAllocations];
}

void discharge(c10::DeviceIndex index, int64_t bytes) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().rows[index][kAllocatedBytes] -= bytes;
}

// What one device allocation owns: raw bytes, or the host storage it was adopted from.
struct Block {
  c10::DeviceIndex index;
  int64_t bytes;
  void* raw;
  void* data;
  c10::Storage host;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (clock_is_on()) {
    forget_memory(block->data);
  }
  discharge(block->index, block->bytes);
  if (block->raw != nullptr) {
    c10::free_cpu(block->raw);
  }
  delete block;
}

c10::DataPtr held(c10::DeviceIndex index, int64_t bytes, void* raw, c10::Storage host) {
  charge(index, bytes);
  void* data = host ? host.mutable_data() : raw;
  if (clock_is_on()) {
    note_memory(data, index);
  }
  auto* block = new Block{index, bytes, raw, data, std::move(host)};
  return {data, block, &release, c10::Device(kType, index)};
}

struct SimulatedAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    if (bytes == 0) {
      return {nullptr, c10::Device(kType, index)};
    }
    void* raw = c10::alloc_cpu(bytes);
    try {
      return held(index, static_cast<int64_t>(bytes), raw, c10::Storage());
    } catch (...) {
      c10::free_cpu(raw);
      throw;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    const auto& row = ledger().rows[existing(index)];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = row[kAllocatedBytes];
      (*bytes)[0].peak = row[kPeakBytes];
    }
    stats.allocation[0].allocated = row[kAllocations];
    stats.num_ooms = row[kRefusals];
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    auto& row = ledger().rows[existing(index)];
    row[kAllocations] = row[kRefusals] = 0;
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    auto& row = ledger().rows[existing(index)];
    row[kPeakBytes] = row[kAllocatedBytes];
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    const auto& row = ledger().rows[existing(index)];
    const int64_t free = std::max<int64_t>(0, row[kCapacityBytes] - row[kAllocatedBytes]);
    return {static_cast<size_t>(free), static_cast<size_t>(row[kCapacityBytes])};
  }
};

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* data) {
    {
      std::lock_guard<std::mutex> lock(ledger().mutex);
      ledger().pinned.erase(data);
    }
    c10::free_cpu(data);
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> lock(ledger().mutex);
      ledger().pinned.insert(data);
    }
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

thread_local c10::DeviceIndex current_index = 0;

SimulatedAllocator& simulated_allocator() {
  static auto* instance = new SimulatedAllocator();
  return *instance;
}

const bool allocator_registered = [] {
  c10::SetAllocator(kType, &simulated_allocator());
  return true;
}();

} // namespace

c10::DeviceIndex existing(c10::DeviceIndex index) {
  const auto found = index < 0 ? current_index : index;
  TORCH_CHECK(
      found < kDeviceCount, "invalid device ordinal acc:", int(found), ", found ", int(kDeviceCount), " devices");
  return found;
}

c10::DeviceIndex current_device() {
  return current_index;
}

void set_current_device(c10::DeviceIndex index) {
  current_index = existing(index);
}

void book_copy(c10::Device source, c10::Device target, int64_t bytes) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  const auto add = [&](c10::DeviceIndex index, Entry bytes_entry, Entry copies_entry) {
    ledger().rows[index][bytes_entry] += bytes;
    ++ledger().rows[index][copies_entry];
  };
  if (source.type() != kType) {
    add(target.index(), kToDeviceBytes, kToDeviceCopies);
  } else if (target.type() != kType) {
    add(source.index(), kToHostBytes, kToHostCopies);
  } else if (source != target) {
    add(target.index(), kPeerBytes, kPeerCopies);
  }
}

c10::DataPtr adopt(c10::DeviceIndex index, const c10::Storage& host) {
  return held(index, static_cast<int64_t>(host.nbytes()), nullptr, host);
}

c10::DeviceAllocator* device_allocator() {
  return &simulated_allocator();
}

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return ledger().pinned.count(data) != 0;
}

} // namespace acc

// Plain C entry points for ctypes: no Python header is needed, so the library builds in seconds.
extern "C" {

int acc_device_count() {
  return acc::kDeviceCount;
}

void acc_read(int index, int64_t* entries) {
  std::lock_guard<std::mutex> lock(acc::ledger().mutex);
  const auto& row = acc::ledger().rows[index];
  std::copy(row.begin(), row.end(), entries);
}

void acc_set_capacity(int index, int64_t bytes) {
  std::lock_guard<std::mutex> lock(acc::ledger().mutex);
  acc::ledger().rows[index][acc::kCapacityBytes] = bytes < 0 ? acc::kUnlimitedBytes : bytes;
}

void acc_refuse(int index, int64_t count) {
  std::lock_guard<std::mutex> lock(acc::ledger().mutex);
  acc::ledger().until_refusal[index] = count;
}

void acc_cap_buffers(int64_t bytes, int ends_process) {
  std::lock_guard<std::mutex> lock(acc::ledger().mutex);
  acc::ledger().buffer_bytes = bytes;
  acc::ledger().ends_process = ends_process != 0;
}

void acc_word_shortage(const char* words) {
  std::lock_guard<std::mutex> lock(acc::ledger().mutex);
  acc::ledger().words = words;
}

void acc_reset_traffic(int index) {
  std::lock_guard<std::mutex> lock(acc::ledger().mutex);
  auto& row = acc::ledger().rows[index];
  std::fill(row.begin() + acc::kToDeviceBytes, row.end(), 0);
}
}

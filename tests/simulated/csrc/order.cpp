#include "order.h"

#include "memory.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace acc {
namespace {

// One stream: when it is free again, what it knows to have ended, and what it has waited for so far.
struct Line {
  double seconds = 0;
  double busy = 0;
  double waited_for_streams = 0;
  double waited_for_host = 0;
  double released = 0; // until when other streams made it wait
  int64_t operations = 0;
  std::map<int64_t, int64_t> ended;
  std::map<int64_t, int64_t> still_used; // by other streams: memory of this stream that was given back
};

// Device memory: the stream in whose pool it is, who wrote it last, and who has used it.
struct Memory {
  int64_t home = 0;
  int64_t writer = -1;
  int64_t written = 0;
  std::map<int64_t, int64_t> users;
};

struct State {
  std::mutex mutex;
  std::atomic<bool> on{false};
  double host_seconds = 0;
  std::map<int64_t, int64_t> host_ended;
  std::map<int64_t, Line> lines;
  std::unordered_map<const void*, Memory> memories;
};

State& state() {
  static auto* instance = new State();
  return *instance;
}

int64_t key_of(const c10::Stream& stream) {
  return (int64_t{stream.device_index()} << 32) + stream.id();
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::impl::getDeviceGuardImpl(kType)->getStream(c10::Device(kType, index));
}

void join(std::map<int64_t, int64_t>& known, const std::map<int64_t, int64_t>& more) {
  for (const auto& [stream, count] : more) {
    auto& own = known[stream];
    own = std::max(own, count);
  }
}

int64_t count_in(const std::map<int64_t, int64_t>& known, int64_t stream) {
  const auto entry = known.find(stream);
  return entry == known.end() ? 0 : entry->second;
}

std::string stream_name(int64_t key) {
  return "stream " + std::to_string(key & 0xffffffff) + " of acc:" + std::to_string(key >> 32);
}

template <typename Visit>
void for_each_device_tensor(const c10::IValue& value, const Visit& visit) {
  const auto see = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().type() == kType && tensor.has_storage()) {
      visit(tensor);
    }
  };
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) {
        see(element.toTensor());
      }
    }
  }
}

} // namespace

bool clock_is_on() {
  return state().on.load(std::memory_order_relaxed);
}

Moment moment_of(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& line = state().lines[key_of(stream)];
  Moment moment{std::max(line.seconds, line.released), line.ended};
  moment.ended[key_of(stream)] = line.operations;
  return moment;
}

void wait_for(const c10::Stream& stream, const Moment& moment) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& line = state().lines[key_of(stream)];
  line.released = std::max(line.released, moment.seconds);
  join(line.ended, moment.ended);
}

void host_waits_for(const Moment& moment) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().host_seconds = std::max(state().host_seconds, moment.seconds);
  join(state().host_ended, moment.ended);
}

void check_order(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto& schema = op.schema();
  for (size_t position = 0; position < arguments.size(); ++position) {
    const auto* alias = schema.arguments()[position].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    for_each_device_tensor(arguments[position], [&](const at::Tensor& tensor) {
      const auto key = key_of(current_stream(tensor.device().index()));
      auto& line = state().lines[key];
      const auto number = line.operations + 1;
      join(line.ended, state().host_ended);
      for (const auto& [user, count] : line.still_used) {
        TORCH_CHECK(
            user == key || count_in(line.ended, user) >= count, op.operator_name().name, " on ", stream_name(key),
            ": it may be given memory that ", stream_name(user), " still uses; found no wait for it");
      }
      auto& memory = state().memories[tensor.storage().data()];
      TORCH_CHECK(
          memory.writer < 0 || memory.writer == key || count_in(line.ended, memory.writer) >= memory.written,
          op.operator_name().name, " on ", stream_name(key), " uses memory that ", stream_name(memory.writer),
          " writes; found no wait for it");
      if (writes) {
        for (const auto& [user, count] : memory.users) {
          TORCH_CHECK(
              user == key || count_in(line.ended, user) >= count, op.operator_name().name, " on ", stream_name(key),
              " writes memory that ", stream_name(user), " still uses; found no wait for it");
        }
        memory.writer = key;
        memory.written = number;
      }
      memory.users[key] = number;
    });
  }
  for (int index = 0; index < kDeviceCount; ++index) {
    ++state().lines[key_of(current_stream(index))].operations;
  }
}

void note_results(const torch::jit::Stack& results) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& result : results) {
    for_each_device_tensor(result, [&](const at::Tensor& tensor) {
      const auto key = key_of(current_stream(tensor.device().index()));
      auto& memory = state().memories[tensor.storage().data()];
      if (memory.writer < 0) {
        memory.writer = key;
        memory.written = state().lines[key].operations;
      }
    });
  }
}

void note_memory(const void* data, c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().memories[data] = Memory{key_of(current_stream(index))};
}

void forget_memory(const void* data) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto entry = state().memories.find(data);
  if (entry == state().memories.end()) {
    return;
  }
  join(state().lines[entry->second.home].still_used, entry->second.users);
  state().memories.erase(entry);
}

} // namespace acc

// Plain C entry points for ctypes.
extern "C" {

// The clock begins at nought, or ends.
void acc_clock(int on) {
  std::lock_guard<std::mutex> lock(acc::state().mutex);
  acc::state().on = on != 0;
  acc::state().host_seconds = 0;
  acc::state().host_ended.clear();
  acc::state().lines.clear();
  acc::state().memories.clear();
}

// The current stream of device `index` is busy for so long; the host waits for the end where `blocking`.
void acc_spend(int index, double seconds, int blocking) {
  const auto key = acc::key_of(acc::current_stream(static_cast<c10::DeviceIndex>(index)));
  std::lock_guard<std::mutex> lock(acc::state().mutex);
  auto& line = acc::state().lines[key];
  const double start = std::max({line.seconds, line.released, acc::state().host_seconds});
  const double before_host = std::max(line.seconds, line.released);
  line.waited_for_streams += before_host - line.seconds;
  line.waited_for_host += start - before_host;
  line.busy += seconds;
  line.seconds = start + seconds;
  if (blocking) {
    acc::state().host_seconds = line.seconds;
    acc::join(acc::state().host_ended, line.ended);
    acc::state().host_ended[key] = line.operations;
  }
}

// The host is busy for so long.
void acc_spend_on_host(double seconds) {
  std::lock_guard<std::mutex> lock(acc::state().mutex);
  acc::state().host_seconds += seconds;
}

// Of one stream of a device: seconds until it is free, busy, waited for other streams, waited for the host.
void acc_read_stream(int index, int64_t id, double* entries) {
  std::lock_guard<std::mutex> lock(acc::state().mutex);
  const auto& line = acc::state().lines[(int64_t{index} << 32) + id];
  entries[0] = std::max(line.seconds, line.released);
  entries[1] = line.busy;
  entries[2] = line.waited_for_streams;
  entries[3] = line.waited_for_host;
}

// The streams of a device that were used, of which `most` are written, and how many there are.
int acc_streams(int index, int64_t* ids, int most) {
  std::lock_guard<std::mutex> lock(acc::state().mutex);
  int count = 0;
  for (const auto& [key, line] : acc::state().lines) {
    if (key >> 32 == index && count < most) {
      ids[count++] = key & 0xffffffff;
    }
  }
  return count;
}

double acc_host_seconds() {
  std::lock_guard<std::mutex> lock(acc::state().mutex);
  return acc::state().host_seconds;
}
}

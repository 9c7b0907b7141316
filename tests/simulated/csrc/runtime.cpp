// What torch asks of a device besides operators: current device, streams, events, generators.
#include "runtime.h"

#include "memory.h"
#include "order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

namespace acc {
namespace {

using Clock = std::chrono::steady_clock;

// A vendor's generator never repeats the host's numbers; noise drawn on the device must look different in a test too.
constexpr uint64_t kSalt = 0x5EED0ACC;

thread_local std::array<c10::StreamId, kDeviceCount> current_streams{};
std::atomic<c10::StreamId> last_stream{0};

// Which device recorded an event, and when: on the wall, and on the streams while a clock is on.
struct Event {
  Clock::time_point time;
  c10::DeviceIndex device;
  bool clocked;
  Moment moment;
};

// Who waited for whom: (device of the waiting stream, device of the stream that recorded), the newest last.
struct Waits {
  std::mutex mutex;
  std::vector<std::pair<int, int>> pairs;
};

Waits& waits() {
  static auto* instance = new Waits();
  return *instance;
}

// Work is finished when a call returns, so streams are names and events are times; who waits for whom is remembered, and
// while a clock is on, what has ended by then.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kType, current_device()};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < kDeviceCount) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDeviceCount;
  }

  static c10::Stream named(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = existing(device.index());
    return named(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return named(existing(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return named(existing(device.index()), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return previous;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (clock_is_on()) {
      host_waits_for(moment_of(stream));
    }
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    for (c10::StreamId id = 0; clock_is_on() && id <= last_stream; ++id) {
      host_waits_for(moment_of(named(existing(index), id)));
    }
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    const bool clocked = clock_is_on();
    *event = new Event{Clock::now(), stream.device_index(), clocked, clocked ? moment_of(stream) : Moment()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      std::lock_guard<std::mutex> lock(waits().mutex);
      waits().pairs.emplace_back(stream.device_index(), static_cast<Event*>(event)->device);
      if (clock_is_on()) {
        wait_for(stream, static_cast<Event*>(event)->moment);
      }
    }
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr && clock_is_on()) {
      host_waits_for(static_cast<Event*>(event)->moment);
    }
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    if (static_cast<Event*>(begin)->clocked && static_cast<Event*>(end)->clocked) {
      return 1e3 * (static_cast<Event*>(end)->moment.seconds - static_cast<Event*>(begin)->moment.seconds);
    }
    const auto span = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A CPU generator under another device name and another sequence.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;

  explicit DeviceGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator(c10::default_rng_seed_val ^ kSalt)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed ^ kSalt);
  }
  uint64_t current_seed() const override {
    return host.current_seed() ^ kSalt;
  }
  uint64_t seed() override {
    const auto drawn = c10::detail::getNonDeterministicRandom();
    set_current_seed(drawn);
    return drawn;
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

static_assert(kDeviceCount == 2, "one default generator per device");

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = new std::array<at::Generator, kDeviceCount>{
      at::make_generator<DeviceGenerator>(c10::DeviceIndex{0}),
      at::make_generator<DeviceGenerator>(c10::DeviceIndex{1})};
  return (*generators)[existing(index)];
}

// While set, a new generator is the device's default one: the way in which Python gets hold of it.
std::atomic<bool> handing_out_defaults{false};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDeviceCount;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto previous = current_device();
    set_current_device(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return handing_out_defaults ? default_generator(index) : at::make_generator<DeviceGenerator>(existing(index));
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = device_allocator()->allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes())) {
      device_allocator()->copy_data(data.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

at::Generator host_generator(const std::optional<at::Generator>& generator, c10::Device device) {
  const auto& chosen = generator.has_value() && generator->defined() ? *generator : default_generator(device.index());
  TORCH_CHECK(
      chosen.device().type() == kType, "Expected a 'acc' device type for generator but found '", chosen.device().type(),
      "'");
  return static_cast<DeviceGenerator*>(chosen.unsafeGetGeneratorImpl())->host;
}

} // namespace acc

// Plain C entry points for ctypes.

// The pairs of devices that waited since the last call; as many as there are, of which `most` are written.
extern "C" int acc_take_waits(int64_t* pairs, int most) {
  std::lock_guard<std::mutex> lock(acc::waits().mutex);
  auto& known = acc::waits().pairs;
  const int count = static_cast<int>(known.size());
  for (int index = 0; index < std::min(count, most); ++index) {
    pairs[2 * index] = known[index].first;
    pairs[2 * index + 1] = known[index].second;
  }
  known.clear();
  return count;
}

extern "C" void acc_hand_out_default_generators(int on) {
  acc::handing_out_defaults = on != 0;
}

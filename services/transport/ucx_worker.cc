#include "services/transport/ucx_worker.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <future>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/transport/ucx_runtime.h"

namespace spl::transport {
namespace {

constexpr size_t kMaxTasks = 1 << 16;
// About 20 us of looking again before the thread sleeps: less than the wake-up it saves.
constexpr int kIdleRounds = 200;
// UCX runs its keep-alive from progress, so the thread looks in even when no event comes.
constexpr int kSleepMsMax = 250;

struct ConfigDeleter {
  void operator()(ucp_config_t* config) const { ucp_config_release(config); }
};

absl::StatusOr<std::unique_ptr<ucp_config_t, ConfigDeleter>> MakeConfig(const std::string& carriers) {
  ucp_config_t* raw = nullptr;
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_config_read(nullptr, nullptr, &raw), "cannot read the UCX configuration"));
  std::unique_ptr<ucp_config_t, ConfigDeleter> config(raw);
  struct Setting {
    const char* name;
    const char* value;
  };
  std::vector<Setting> settings = {
      // 64 KiB segments (the default is less) leave TCP at 40% of a plain socket's rate.
      {"TCP_TX_SEG_SIZE", "256k"},
      {"TCP_RX_SEG_SIZE", "256k"},
      // A restarted worker may listen on its old port at once.
      {"TCP_CM_REUSEADDR", "y"},
  };
  if (carriers == "tcp") {
    settings.push_back({"TLS", "tcp"});
  } else if (carriers == "shm") {
    settings.push_back({"TLS", "posix,sysv,cma,self,tcp"});  // tcp carries the connection set-up only
  } else if (carriers != "auto") {
    return InvalidArgument("transport carriers '{}' are not auto, shm or tcp", carriers);
  }
  for (const Setting& setting : settings) {
    const ucs_status_t status = ucp_config_modify(config.get(), setting.name, setting.value);
    SPLICE_RETURN_IF_ERROR(StatusFromUcs(status, fmt::format("UCX setting {}={}", setting.name, setting.value)));
  }
  return config;
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(const std::string& carriers) {
  InitUcxProcess();
  auto worker = std::unique_ptr<UcxWorker>(new UcxWorker);
  SPLICE_RETURN_IF_ERROR(worker->Init(carriers));
  return worker;
}

UcxWorker::~UcxWorker() {
  Stop();
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
  if (epoll_fd_ >= 0) close(epoll_fd_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

absl::Status UcxWorker::Init(const std::string& carriers) {
  SPLICE_ASSIGN_OR_RETURN(const auto config, MakeConfig(carriers));
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_init(&params, config.get(), &context_), "ucp_init"));
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // created here, used by the progress thread
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_worker_create(context_, &worker_params, &worker_), "ucp_worker_create"));
  int ucx_fd = -1;
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_worker_get_efd(worker_, &ucx_fd), "ucp_worker_get_efd"));
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_fd_ < 0 || wake_fd_ < 0 || epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, ucx_fd, &event) != 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) != 0) {
    return Errorf(absl::StatusCode::kResourceExhausted, "transport: no file descriptors left (errno {})", errno);
  }
  thread_ = std::thread([this] { Loop(); });
  return absl::OkStatus();
}

bool UcxWorker::Post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || tasks_.size() >= kMaxTasks) return false;
    tasks_.push_back(std::move(task));
    if (tasks_.size() > 1) return true;  // the first one has woken the thread already
  }
  Wake();
  return true;
}

absl::Status UcxWorker::Run(const std::function<void()>& task) {
  const auto done = std::make_shared<std::promise<void>>();
  if (!Post([&task, done] {
        task();
        done->set_value();
      })) {
    return Errorf(absl::StatusCode::kUnavailable, "the transport is stopped or its queue is full");
  }
  done->get_future().wait();
  return absl::OkStatus();
}

void UcxWorker::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (!thread_.joinable()) return;
  Wake();
  thread_.join();
}

void UcxWorker::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void UcxWorker::Loop() {
  int idle_rounds = 0;
  for (;;) {
    RunTasks();
    if (Progress()) {
      idle_rounds = 0;
    } else if (++idle_rounds >= kIdleRounds) {
      {
        std::lock_guard lock(mutex_);
        if (stopping_ && tasks_.empty()) return;
        if (!tasks_.empty()) continue;
      }
      Sleep();
      idle_rounds = 0;
    }
  }
}

void UcxWorker::RunTasks() {
  std::vector<std::function<void()>> ready;
  {
    std::lock_guard lock(mutex_);
    ready.swap(tasks_);
  }
  for (auto& task : ready) task();
}

// At most a few rounds, so that a busy wire does not keep tasks waiting.
bool UcxWorker::Progress() {
  bool moved = false;
  for (int round = 0; round < 64 && ucp_worker_progress(worker_) != 0; ++round) moved = true;
  return moved;
}

void UcxWorker::Sleep() {
  if (ucp_worker_arm(worker_) == UCS_ERR_BUSY) return;  // something arrived in between
  epoll_event events[2];
  epoll_wait(epoll_fd_, events, 2, kSleepMsMax);
  uint64_t count;
  [[maybe_unused]] const ssize_t drained = read(wake_fd_, &count, sizeof(count));
}

}  // namespace spl::transport

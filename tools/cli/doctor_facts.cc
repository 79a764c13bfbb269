#include "tools/cli/doctor_facts.h"

#include <dlfcn.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "kernels/common/cpu_features.h"
#include "kernels/common/host_memory.h"
#include "kernels/common/plugin.h"
#include "kernels/cuda/cuda_libraries.h"
#include "services/base/address.h"
#include "services/base/clock.h"
#include "services/base/status.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/model_config.h"
#include "services/hub/model_places.h"
#include "services/tokenizer/tokenizer.h"
#include "services/transport/kv_transport.h"
#include "tools/cli/api_client.h"

extern char** environ;

namespace spl::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

std::string ReadLine(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> NamesIn(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

// ---- GPUs: NVML, which needs no context and changes nothing. Its types as nvml.h has them.

struct NvmlMemory {
  unsigned long long total, free, used;
};

class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL)) { ready_ = Call<int()>("nvmlInit_v2") == 0; }
  ~Nvml() {
    if (ready_) (void)Call<int()>("nvmlShutdown");
  }
  bool ready() const { return ready_; }

  // Result of the function; -1: the library has no such function.
  template <typename Signature, typename... Arguments>
  int Call(const char* name, Arguments... arguments) const {
    if (library_ == nullptr) return -1;
    auto* function = reinterpret_cast<Signature*>(dlsym(library_, name));
    return function == nullptr ? -1 : function(arguments...);
  }

 private:
  void* const library_;
  bool ready_ = false;
};

GpuFact ReadGpu(const Nvml& nvml, unsigned index, void* device) {
  GpuFact gpu;
  gpu.index = static_cast<int>(index);
  char name[96] = "";
  (void)nvml.Call<int(void*, char*, unsigned)>("nvmlDeviceGetName", device, name, sizeof(name));
  gpu.name = name;
  NvmlMemory memory{};
  (void)nvml.Call<int(void*, NvmlMemory*)>("nvmlDeviceGetMemoryInfo", device, &memory);
  gpu.total_bytes = memory.total;
  gpu.free_bytes = memory.free;
  (void)nvml.Call<int(void*, int*, int*)>("nvmlDeviceGetCudaComputeCapability", device, &gpu.compute_major,
                                          &gpu.compute_minor);
  int current = 0, pending = 0;
  if (nvml.Call<int(void*, int*, int*)>("nvmlDeviceGetEccMode", device, &current, &pending) == 0)
    gpu.ecc = current != 0;
  if (nvml.Call<int(void*, int*)>("nvmlDeviceGetPersistenceMode", device, &current) == 0)
    gpu.persistence = current != 0;
  return gpu;
}

void CollectGpus(DoctorFacts& facts) {
  facts.build_cuda_major = SPLICE_DOCTOR_CUDA_MAJOR;
  facts.build_architectures = SPLICE_DOCTOR_CUDA_ARCHITECTURES;
  if (facts.build_cuda_major == 0) return;
  const Nvml nvml;
  if (!nvml.ready()) return;
  char driver[96] = "";
  (void)nvml.Call<int(char*, unsigned)>("nvmlSystemGetDriverVersion", driver, sizeof(driver));
  facts.driver_version = driver;
  (void)nvml.Call<int(int*)>("nvmlSystemGetCudaDriverVersion_v2", &facts.driver_cuda_version);
  const auto library = [&](const std::string& name, const std::string& package, const std::string& needed_for) {
    facts.libraries.push_back({name, needed_for, MessageOf(kernels::OpenCudaLibrary(name, package).status())});
  };
  library("libcublasLt.so." + std::to_string(facts.build_cuda_major), "cublas", "");
  library("libnccl.so.2", "nccl", "models on several GPUs (--tp)");
  facts.libraries.push_back(
      {"libsplice_cuda.so", "", MessageOf(kernels::OpenPlugin("splice_cuda", "SPLICE_CUDA_PLUGIN").status())});
  unsigned count = 0;
  (void)nvml.Call<int(unsigned*)>("nvmlDeviceGetCount_v2", &count);
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    if (nvml.Call<int(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2", i, &device) == 0)
      facts.gpus.push_back(ReadGpu(nvml, i, device));
  }
}

// ---- network

void CollectNics(DoctorFacts& facts) {
  for (const std::string& name : NamesIn("/sys/class/net")) {
    const fs::path folder = fs::path("/sys/class/net") / name;
    if (name == "lo") continue;
    NicFact nic{.name = name, .up = ReadLine(folder / "operstate") == "up", .megabits_per_s = std::nullopt};
    const std::string speed = ReadLine(folder / "speed");  // -1 or nothing if there is no line
    if (const int64_t value = std::atoll(speed.c_str()); value > 0) nic.megabits_per_s = value;
    facts.nics.push_back(nic);
  }
  facts.rdma_devices = NamesIn("/sys/class/infiniband");
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    const size_t equals = text.find('=');
    if (text.starts_with("UCX_") && equals != std::string::npos)
      facts.ucx_environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
}

constexpr size_t kTransferBytes = 64 << 20;
constexpr int kTransferRounds = 5;

// Takes the best of some rounds, because other processes only make it slower.
template <typename Work>
double BestSeconds(Work work) {
  double best = 1e9;
  for (int i = 0; i < kTransferRounds; ++i) {
    const auto start = Clock::now();
    if (!work()) return 0;
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

absl::Status MeasureTransfer(const std::string& listen_host, TransferFact& fact, double& memcpy_bytes_per_s) {
  transport::TransportOptions options;
  options.carriers = fact.asked;
  options.listen_host = listen_host;
  SPLICE_ASSIGN_OR_RETURN(const auto reader, transport::KvTransport::Create(options));
  SPLICE_ASSIGN_OR_RETURN(const auto writer, transport::KvTransport::Create(options));
  SPLICE_ASSIGN_OR_RETURN(auto memory, reader->Allocate(kTransferBytes));
  SPLICE_ASSIGN_OR_RETURN(auto source, writer->Allocate(kTransferBytes));
  std::memset(source->data(), 1, kTransferBytes);
  std::memset(memory->data(), 2, kTransferBytes);
  const transport::RemoteMemory remote{reader->listen_address(), memory->packed_rkey(),
                                       reinterpret_cast<uint64_t>(memory->data()), memory->size(), transport::HostId()};
  auto channel = writer->Connect(remote, 10s);
  absl::Status status = channel.status();
  if (status.ok()) {
    fact.carrier = (*channel)->carrier();
    const double seconds = BestSeconds([&] {
      status = (*channel)->Put({{source->data(), 0, kTransferBytes}}, [](const absl::Status&) {});
      if (status.ok()) status = (*channel)->FlushAndWait(10s);
      return status.ok();
    });
    if (status.ok()) fact.bytes_per_s = static_cast<double>(kTransferBytes) / seconds;
    (void)(*channel)->Close(10s);
  }
  const double copy = BestSeconds([&] {
    std::memcpy(memory->data(), source->data(), kTransferBytes);
    return true;
  });
  memcpy_bytes_per_s = std::max(memcpy_bytes_per_s, static_cast<double>(kTransferBytes) / copy);
  source.reset();
  writer->Stop();
  memory.reset();
  reader->Stop();
  return status;
}

void CollectTransfers(const DoctorOptions& options, DoctorFacts& facts) {
  for (const char* asked : {"auto", "tcp"}) {
    TransferFact fact{.asked = asked};
    const absl::Status measured = MeasureTransfer(options.kv_listen_host, fact, facts.memcpy_bytes_per_s);
    if (!measured.ok()) fact.error = MessageOf(measured);
    facts.transfers.push_back(std::move(fact));
  }
}

// ---- clocks

// Compares the router's clock with this machine's, and the workers' with the router's, which knows them from its polls.
absl::Status CollectClocks(const DoctorOptions& options, DoctorFacts& facts) {
  SPLICE_ASSIGN_OR_RETURN(
      const auto client,
      ApiClient::Create(
          {.url = options.router, .api_key = options.api_key, .ca_file = options.ca_file, .flag = "--router"}));
  ClockFact router{.program = "router"};
  for (int i = 0; i < 5; ++i) {
    const auto asked = Clock::now();
    SPLICE_ASSIGN_OR_RETURN(const nlohmann::json status, client->Get("/control/v1/status"));
    const double bound_s = std::chrono::duration<double>(Clock::now() - asked).count() / 2;
    if (!status.contains("unix_seconds")) return absl::UnimplementedError("this router does not tell its time");
    if (i > 0 && bound_s > router.bound_s) continue;
    router.bound_s = bound_s;
    router.offset_s = status["unix_seconds"].get<double>() - static_cast<double>(UnixNanos()) / 1e9 + bound_s;
  }
  facts.clocks.push_back(router);
  SPLICE_ASSIGN_OR_RETURN(const nlohmann::json workers, client->Get("/control/v1/workers"));
  for (const nlohmann::json& worker : workers.at("data")) {
    ClockFact fact{.program = worker.at("worker").get<std::string>()};
    const nlohmann::json clock = worker.value("clock", nlohmann::json());
    if (clock.is_null()) {
      fact.error = "this worker does not tell its time";
    } else {
      fact.offset_s = clock.at("offset_seconds");
      fact.bound_s = clock.at("bound_seconds");
    }
    facts.clocks.push_back(std::move(fact));
  }
  return absl::OkStatus();
}

// ---- limits

uint64_t SoftLimit(const rlimit& limit) { return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur; }
uint64_t HardLimit(const rlimit& limit) { return limit.rlim_max == RLIM_INFINITY ? UINT64_MAX : limit.rlim_max; }

void CollectLimits(DoctorFacts& facts) {
  rlimit limit{};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  facts.open_files = SoftLimit(limit);
  facts.open_files_hard = HardLimit(limit);
  (void)getrlimit(RLIMIT_MEMLOCK, &limit);
  facts.locked_bytes = SoftLimit(limit);
  // "always [madvise] never"
  const std::string pages = ReadLine("/sys/kernel/mm/transparent_hugepage/enabled");
  if (const size_t open = pages.find('['); open != std::string::npos)
    facts.transparent_huge_pages = pages.substr(open + 1, pages.find(']') - open - 1);
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) facts.shm_free_bytes = uint64_t{shm.f_bavail} * shm.f_frsize;
  if (const auto memory = kernels::ReadHostMemory(); memory.ok())
    facts.memory_available_bytes = memory->available_bytes;
}

// Listens like the servers (SO_REUSEADDR): an address with only lingering connections counts as free.
std::string WhyNotListen(const std::string& address) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok()) return MessageOf(parsed.status());
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(parsed->host.c_str(), std::to_string(parsed->port).c_str(), &hints, &found);
      error != 0)
    return gai_strerror(error);
  std::string why;
  const int fd = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
  const int on = 1;
  (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0) why = std::strerror(errno);
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return why;
}

// ---- folders

DoctorFacts::Model ReadModel(const std::string& wanted) {
  DoctorFacts::Model model{
      .dir = wanted, .error = "", .weight_bytes = 0, .weights = "", .has_tokenizer = false, .tokenizer_error = ""};
  const auto found = hub::LocalModelFolder(hub::ModelPlaces::FromEnvironment(), wanted, hub::FolderUse::kModel);
  if (!found.ok()) {
    model.error = MessageOf(found.status());
    return model;
  }
  const std::string& dir = model.dir = *found;
  const auto config = engine::LoadModelConfig(dir);
  const auto checkpoint = engine::Checkpoint::Open(dir);
  if (!config.ok() || !checkpoint.ok()) {
    model.error = MessageOf(config.ok() ? checkpoint.status() : config.status());
    return model;
  }
  model.weights = config->weights_name();
  model.max_context = config->max_positions;
  const uint64_t token_bytes = 2 * uint64_t{static_cast<uint32_t>(config->num_layers)} *
                               static_cast<uint32_t>(config->kv_size()) *
                               (config->dtype == kernels::DType::kF32 ? 4 : 2);  // --kv-dtype auto
  model.sequence_bytes = token_bytes * static_cast<uint64_t>(model.max_context);
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (entry.path().extension() == ".safetensors") model.weight_bytes += fs::file_size(entry.path(), error);
  }
  model.has_tokenizer = fs::exists(fs::path(dir) / "tokenizer.json", error);
  if (model.has_tokenizer) model.tokenizer_error = MessageOf(tokenizer::Tokenizer::Load(dir).status());
  return model;
}

DoctorFacts::Disk ReadDisk(const std::string& dir) {
  std::error_code error;
  fs::path folder = fs::absolute(dir, error);
  while (!fs::exists(folder, error) && folder.has_parent_path() && folder != folder.parent_path())
    folder = folder.parent_path();
  DoctorFacts::Disk disk{.dir = folder, .error = "", .free_bytes = 0};
  struct statvfs space {};
  if (!fs::is_directory(folder, error))
    disk.error = folder.string() + " is no folder";
  else if (access(folder.c_str(), W_OK | X_OK) != 0)
    disk.error = folder.string() + ": " + std::strerror(errno);
  else if (statvfs(folder.c_str(), &space) == 0)
    disk.free_bytes = uint64_t{space.f_bavail} * space.f_frsize;
  return disk;
}

}  // namespace

DoctorFacts CollectDoctorFacts(const DoctorOptions& options) {
  DoctorFacts facts;
  if (options.backend != "cpu") CollectGpus(facts);
  facts.cpu_isa = kernels::CpuIsaName(kernels::DetectCpuIsa());
  facts.cpu_bf16 = kernels::CpuHasBf16Gemm();
  facts.num_cpus = static_cast<int>(std::thread::hardware_concurrency());
  CollectNics(facts);
  CollectLimits(facts);  // before transfers use memory
  CollectTransfers(options, facts);
  if (!options.router.empty()) {
    const absl::Status clocks = CollectClocks(options, facts);
    if (!clocks.ok()) facts.clocks.push_back({.program = "router", .error = MessageOf(clocks)});
  }
  for (const std::string& address : options.listen) facts.ports.push_back({address, WhyNotListen(address)});
  if (!options.model_dir.empty()) facts.model = ReadModel(options.model_dir);
  if (!options.data_dir.empty()) facts.disk = ReadDisk(options.data_dir);
  return facts;
}

}  // namespace spl::cli

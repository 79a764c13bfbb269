#include "tools/cli/doctor_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "services/base/byte_size.h"
#include "services/worker_flags/kv_pool.h"

namespace spl::cli {
namespace {

// The router keeps 4,096 clients by default; workers, stores, files and libraries come on top.
constexpr uint64_t kOpenFilesWanted = 8'192, kOpenFilesNeeded = 1'024;
// A transfer inside the host is one memcpy by the transport's thread. A rate well below that of memcpy shows a fault.
constexpr double kShmShareMin = 0.3;
constexpr double kTcpBytesPerSecondMin = 0.5e9;
// Splice does not compare clocks of machines, but people compare logs and traces, and certificates have dates.
constexpr double kClockAdviceSeconds = 0.1, kClockWrongSeconds = 5;
constexpr uint64_t kPoolBytesAtLeast = 256ull << 20;
// Defaults of `splice serve`; the workspace is about that of an 8B model.
constexpr int32_t kSequences = 64;
constexpr uint64_t kWorkspaceBytes = 768ull << 20;

class Findings {
 public:
  void Fine(std::string check, std::string value) {
    list.push_back({std::move(check), DoctorLevel::kFine, value, "", ""});
  }
  void Advice(std::string check, std::string value, std::string should, std::string change) {
    list.push_back({std::move(check), DoctorLevel::kAdvice, std::move(value), std::move(should), std::move(change)});
  }
  void Wrong(std::string check, std::string value, std::string should, std::string change) {
    list.push_back({std::move(check), DoctorLevel::kWrong, std::move(value), std::move(should), std::move(change)});
  }
  void Say(bool wrong, std::string check, std::string value, std::string should, std::string change) {
    list.push_back({std::move(check), wrong ? DoctorLevel::kWrong : DoctorLevel::kAdvice, std::move(value),
                    std::move(should), std::move(change)});
  }
  std::vector<DoctorFinding> list;
};

std::string CudaVersion(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }
std::string GigabytesPerSecond(double bytes_per_s) { return fmt::format("{:.1f} GB/s", bytes_per_s / 1e9); }
std::string Limit(uint64_t value) { return value == UINT64_MAX ? "unlimited" : std::to_string(value); }
std::string LimitBytes(uint64_t value) { return value == UINT64_MAX ? "unlimited" : FormatByteSize(value); }

// Code for an architecture runs on GPUs of the same major and the same or a higher minor version; code for an "a"
// architecture only on that one. Without "-real" there is also PTX, which the driver compiles for all later ones.
bool Runs(const std::string& architectures, int major, int minor) {
  for (size_t at = 0; at < architectures.size();) {
    const size_t end = std::min(architectures.find(',', at), architectures.size());
    const std::string one = architectures.substr(at, end - at);
    at = end + 1;
    const int number = std::atoi(one.c_str());
    const bool exact = one.find('a') < one.find('-');
    const bool real = one.ends_with("-real");
    const int ours = major * 10 + minor;
    if (exact ? ours == number : ours / 10 == number / 10 && ours >= number) return true;
    if (!exact && !real && ours >= number) return true;
  }
  return false;
}

void JudgeGpus(const DoctorFacts& f, const DoctorOptions& options, Findings& out) {
  if (options.backend == "cpu") return out.Fine("gpu", "not looked at (--backend cpu)");
  const bool required = options.backend == "cuda";
  const std::string or_cpu = required ? "" : ", or --backend cpu if the CPU is meant";
  if (f.build_cuda_major == 0)
    return out.Say(required, "gpu", "this build has no GPU part", "a build with CUDA",
                   "build on a machine with nvcc, or take the GPU image" + or_cpu);
  if (f.driver_version.empty())
    return out.Say(required, "driver", "no NVIDIA driver", fmt::format("one for CUDA {}", f.build_cuda_major),
                   "install the driver; in a container: --gpus all, or the GPU resource of the pod" + or_cpu);
  const std::string driver = fmt::format("{}, CUDA {}", f.driver_version, CudaVersion(f.driver_cuda_version));
  if (f.driver_cuda_version < f.build_cuda_major * 1000)
    out.Wrong("driver", driver, fmt::format("CUDA {}.0 or later: this build was made with it", f.build_cuda_major),
              "update the driver, or build with the toolkit of the driver's version");
  else
    out.Fine("driver", driver);
  for (const LibraryFact& library : f.libraries) {
    if (library.error.empty())
      out.Fine("library " + library.name, "found");
    else
      out.Say(library.needed_for.empty(), "library " + library.name, library.error,
              library.needed_for.empty() ? "found" : "found, for " + library.needed_for,
              "install it, or name its folder in SPLICE_CUDA_LIBS (a plug-in: beside the program or in ../lib)");
  }
  if (f.gpus.empty())
    out.Say(required, "gpu", "none", "at least one",
            "nvidia-smi -L shows what the driver sees; in a container: --gpus");
  for (const GpuFact& gpu : f.gpus) {
    const std::string check = fmt::format("gpu {}", gpu.index);
    const auto on = [](const std::optional<bool>& flag) {
      return !flag.has_value() ? "unknown" : *flag ? "on" : "off";
    };
    const std::string value = fmt::format("{}, {} of {} free, compute {}.{}, ECC {}, persistence {}", gpu.name,
                                          FormatByteSize(gpu.free_bytes), FormatByteSize(gpu.total_bytes),
                                          gpu.compute_major, gpu.compute_minor, on(gpu.ecc), on(gpu.persistence));
    if (!Runs(f.build_architectures, gpu.compute_major, gpu.compute_minor))
      out.Wrong(check, value, "one that the build has code for: " + f.build_architectures,
                fmt::format("build with -DCMAKE_CUDA_ARCHITECTURES={}{}", gpu.compute_major, gpu.compute_minor));
    else if (gpu.ecc == false)
      out.Advice(check, value, "ECC on: nobody else notices a flipped bit in weights",
                 fmt::format("nvidia-smi -i {} -e 1, and a reboot", gpu.index));
    else if (gpu.persistence == false)
      out.Advice(check, value, "persistence on: the first start after a pause is slow without",
                 fmt::format("nvidia-smi -i {} -pm 1", gpu.index));
    else if (gpu.free_bytes < options.kv_bytes.value_or(KvMargin(gpu.total_bytes)))
      out.Advice(check, value,
                 options.kv_bytes.has_value()
                     ? fmt::format("more free than --kv-bytes, {}", FormatByteSize(*options.kv_bytes))
                     : fmt::format("more free than the margin that --kv-bytes auto leaves, {}",
                                   FormatByteSize(KvMargin(gpu.total_bytes))),
                 "nvidia-smi shows who uses it; or a smaller --kv-bytes");
    else
      out.Fine(check, value);
  }
}

void JudgeCpu(const DoctorFacts& f, Findings& out) {
  const std::string value =
      fmt::format("{} cores, {}{}", f.num_cpus, f.cpu_isa, f.cpu_bf16 ? ", bf16 products" : ", no bf16 products");
  if (f.cpu_isa == "portable")
    out.Advice("cpu", value, "AVX2 or AVX-512: computing on the CPU is very slow without",
               "another machine type, or let the hypervisor pass the CPU's features on");
  else if (!f.cpu_bf16 && f.gpus.empty())
    out.Advice("cpu", value, "AVX512-BF16 or AMX where models are computed on the CPU",
               "another machine type, or let the hypervisor pass the CPU's features on");
  else
    out.Fine("cpu", value);
}

void JudgeNetwork(const DoctorFacts& f, Findings& out) {
  std::optional<double> line;
  for (const NicFact& nic : f.nics) {
    const std::string speed = nic.megabits_per_s.has_value()
                                  ? fmt::format("{} Gbit/s", static_cast<double>(*nic.megabits_per_s) / 1e3)
                                  : "no line speed";
    out.Fine("nic " + nic.name, fmt::format("{}, {}", nic.up ? "up" : "down", speed));
    if (nic.up && nic.megabits_per_s.has_value())
      line = std::max(line.value_or(0), static_cast<double>(*nic.megabits_per_s) * 1e6 / 8);
  }
  if (!f.rdma_devices.empty()) {
    std::string names;
    for (const std::string& name : f.rdma_devices) names += (names.empty() ? "" : ", ") + name;
    out.Fine("rdma", names);
  }
  for (const auto& [name, value] : f.ucx_environment) {
    const std::string check = "environment " + name;
    if (name == "UCX_TLS" && value != "all" && value.find("tcp") == std::string::npos &&
        value.find('^') == std::string::npos)
      out.Wrong(check, value, "a list with tcp in it: connections between workers are made over it",
                fmt::format("UCX_TLS=tcp,{}, or unset it", value));
    else if (name == "UCX_PROTO_ENABLE" && (value == "y" || value == "1" || value == "yes"))
      out.Wrong(check, value, "off: UCX 1.13 aborts with it", "unset UCX_PROTO_ENABLE");
    else
      out.Fine(check, value);
  }
  for (const TransferFact& transfer : f.transfers) {
    const std::string check = "transfer " + transfer.asked;
    if (!transfer.error.empty()) {
      out.Wrong(check, transfer.error, "a connection from this machine to itself",
                "--kv-listen-host must be an address of this machine; UCX_* in the environment; a firewall on lo");
      continue;
    }
    const std::string value = fmt::format("{} by {} (memcpy {})", GigabytesPerSecond(transfer.bytes_per_s),
                                          transfer.carrier, GigabytesPerSecond(f.memcpy_bytes_per_s));
    if (transfer.carrier == "shm" && transfer.bytes_per_s < kShmShareMin * f.memcpy_bytes_per_s)
      out.Advice(check, value, fmt::format("at least {:.0f} % of memcpy", kShmShareMin * 100),
                 "free cores: the transport's thread has to share; a larger /dev/shm");
    else if (transfer.asked == "auto" && transfer.carrier != "shm")
      out.Advice(check, value, "shm inside one machine",
                 "a larger /dev/shm; one IPC namespace for workers of one machine");
    else if (transfer.carrier == "tcp" && transfer.bytes_per_s < kTcpBytesPerSecondMin)
      out.Advice(check, value, "at least " + GigabytesPerSecond(kTcpBytesPerSecondMin),
                 "free cores; check the CPU's frequency governor");
    else if (transfer.carrier == "tcp" && line.has_value() && transfer.bytes_per_s < *line)
      out.Advice(check, value,
                 fmt::format("the line's {}: TCP on this machine does not fill it", GigabytesPerSecond(*line)),
                 "RDMA, if the NIC can; else free cores");
    else
      out.Fine(check, value);
  }
  if (!f.rdma_devices.empty() && f.locked_bytes != UINT64_MAX)
    out.Wrong(
        "locked memory", LimitBytes(f.locked_bytes), "unlimited: RDMA locks the KV pool",
        "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd); securityContext.capabilities IPC_LOCK (Kubernetes)");
  else
    out.Fine("locked memory", LimitBytes(f.locked_bytes));
}

void JudgeClocks(const DoctorFacts& f, Findings& out) {
  for (const ClockFact& clock : f.clocks) {
    const std::string check = "clock " + clock.program;
    if (!clock.error.empty()) {
      out.Advice(check, clock.error, "an answer", "a router of this version at --router, and an operator's --api-key");
      continue;
    }
    const std::string value = fmt::format("{:+.1f} ms ± {:.1f} ms", clock.offset_s * 1e3, clock.bound_s * 1e3);
    const double surely = std::max(0.0, std::abs(clock.offset_s) - clock.bound_s);
    if (surely > kClockAdviceSeconds)
      out.Say(surely > kClockWrongSeconds, check, value, fmt::format("within {:.0f} ms", kClockAdviceSeconds * 1e3),
              "chronyc tracking, or timedatectl timesync-status, there and here; enable NTP");
    else
      out.Fine(check, value);
  }
}

// The pool of `splice serve`. Returns the host memory that it needs: with a GPU, and where nothing is known of the
// model, the size that was given, or the least that makes sense.
uint64_t JudgePool(const DoctorFacts& f, const DoctorOptions& options, Findings& out) {
  const uint64_t unknown = options.kv_bytes.value_or(kPoolBytesAtLeast);
  if (!f.model.has_value() || f.model->sequence_bytes == 0) return unknown;
  const DoctorFacts::Model& model = *f.model;
  const KvPoolNeed need{.name = "shared",
                        .bytes = options.kv_bytes,
                        .max_context = model.max_context,
                        .sequence_bytes = model.sequence_bytes,
                        .max_sequences = kSequences,
                        .num_ranks = 1,
                        .other_bytes = 2 * kWorkspaceBytes};
  KvRoom room{.on_host = f.gpus.empty(), .free_bytes = f.memory_available_bytes, .total_bytes = 0};
  if (!f.gpus.empty()) {
    room.free_bytes = f.gpus[0].free_bytes;
    room.total_bytes = f.gpus[0].total_bytes;
  }
  room.free_bytes -= std::min(room.free_bytes, model.weight_bytes);
  const auto sizes = DivideKvRoom(room, {&need, 1});
  const std::string fewer = "a smaller model, more GPUs (--tp), or more memory";
  if (!sizes.ok()) {
    out.Wrong("kv pool", MessageOf(sizes.status()), "room for 256 tokens", fewer);
    return unknown;
  }
  const uint64_t bytes = (*sizes)[0].bytes;
  const int64_t tokens = TokensOfPool(need, bytes);
  const std::string value =
      fmt::format("{}{} ({} tokens)", options.kv_bytes.has_value() ? "" : "auto: ", FormatByteSize(bytes), tokens);
  if (tokens < model.max_context)
    out.Advice("kv pool", value, fmt::format("{} tokens, the model's context", model.max_context),
               "shorter prompts are served; for longer ones a larger --kv-bytes, or " + fewer);
  else
    out.Fine("kv pool", value);
  return f.gpus.empty() ? bytes : unknown;
}

void JudgeLimits(const DoctorFacts& f, uint64_t pool_bytes, Findings& out) {
  const std::string files = Limit(f.open_files);
  if (f.open_files < kOpenFilesWanted)
    out.Say(f.open_files < kOpenFilesNeeded, "open files", files, fmt::format("{} or more", kOpenFilesWanted),
            fmt::format("ulimit -n {} (the hard limit is {}); LimitNOFILE= (systemd); --ulimit nofile (docker)",
                        std::min(f.open_files_hard, kOpenFilesWanted), Limit(f.open_files_hard)));
  else
    out.Fine("open files", files);
  if (f.transparent_huge_pages == "never")
    out.Advice("huge pages", "never", "madvise or always: weights and KV are asked for in huge pages",
               "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  else
    out.Fine("huge pages", f.transparent_huge_pages.empty() ? "not told" : f.transparent_huge_pages);
  const std::string pools = FormatByteSize(pool_bytes);
  if (!f.shm_free_bytes.has_value())
    out.Advice("/dev/shm", "there is none", "room for the KV pool, " + pools, "mount -t tmpfs tmpfs /dev/shm");
  else if (*f.shm_free_bytes < pool_bytes)
    out.Advice("/dev/shm", FormatByteSize(*f.shm_free_bytes) + " free", "room for the KV pool, " + pools,
               "mount -o remount,size=… /dev/shm; --shm-size (docker); an emptyDir with medium: Memory (Kubernetes)");
  else
    out.Fine("/dev/shm", FormatByteSize(*f.shm_free_bytes) + " free");
  uint64_t needed = f.gpus.empty() ? pool_bytes : 0;
  if (f.model.has_value() && f.gpus.empty()) needed += f.model->weight_bytes;
  const std::string memory = FormatByteSize(f.memory_available_bytes) + " available";
  if (f.memory_available_bytes < needed)
    out.Wrong("memory", memory, FormatByteSize(needed) + " for weights and the KV pool",
              "a smaller --kv-bytes, or more memory");
  else
    out.Fine("memory", memory);
  for (const PortFact& port : f.ports) {
    if (port.error.empty())
      out.Fine("port " + port.address, "free");
    else
      out.Wrong("port " + port.address, port.error, "free",
                "ss -ltnp shows who listens; or another --http or --grpc (port 0 picks a free one)");
  }
}

void JudgeFolders(const DoctorFacts& f, const DoctorOptions& options, Findings& out) {
  if (f.model.has_value()) {
    const DoctorFacts::Model& model = *f.model;
    if (!model.error.empty())
      out.Wrong("model", model.error, "config.json and safetensors files that fit together",
                "download the folder again; it must be readable by this user");
    else
      out.Fine("model",
               fmt::format("{}, {} of weights in {}", model.dir, FormatByteSize(model.weight_bytes), model.weights));
    if (model.error.empty() && !model.has_tokenizer)
      out.Advice("tokenizer", "no tokenizer.json", "one: without it requests must send token ids",
                 "--tokenizer names another folder");
    else if (!model.tokenizer_error.empty())
      out.Wrong("tokenizer", model.tokenizer_error, "one that Splice reads", "--tokenizer names another folder");
    else if (model.error.empty())
      out.Fine("tokenizer", "read");
  }
  if (f.disk.has_value()) {
    const DoctorFacts::Disk& disk = *f.disk;
    const std::string value = fmt::format("{}: {} free", disk.dir, FormatByteSize(disk.free_bytes));
    if (!disk.error.empty())
      out.Wrong("store disk", disk.error, "a folder that this user may write", "mkdir, chown, or another --data-dir");
    else if (disk.free_bytes < options.store_disk_bytes)
      out.Wrong("store disk", value, FormatByteSize(options.store_disk_bytes) + ", which the store may fill",
                "a smaller --disk-bytes (splice serve: --store-disk-bytes), or a larger volume");
    else
      out.Fine("store disk", value);
  }
}

const char* LevelName(DoctorLevel level) {
  return level == DoctorLevel::kFine ? "fine" : level == DoctorLevel::kAdvice ? "advice" : "wrong";
}

}  // namespace

std::vector<DoctorFinding> JudgeDoctorFacts(const DoctorFacts& facts, const DoctorOptions& options) {
  Findings out;
  JudgeGpus(facts, options, out);
  JudgeCpu(facts, out);
  JudgeNetwork(facts, out);
  JudgeClocks(facts, out);
  JudgeLimits(facts, JudgePool(facts, options, out), out);
  JudgeFolders(facts, options, out);
  return std::move(out.list);
}

bool AnyWrong(const std::vector<DoctorFinding>& findings) {
  return std::any_of(findings.begin(), findings.end(),
                     [](const DoctorFinding& f) { return f.level == DoctorLevel::kWrong; });
}

std::string DoctorTable(const std::vector<DoctorFinding>& findings) {
  size_t width = 0;
  for (const DoctorFinding& f : findings) width = std::max(width, f.check.size());
  std::string out;
  for (const DoctorFinding& f : findings) {
    const char* mark = f.level == DoctorLevel::kFine ? "ok    " : f.level == DoctorLevel::kAdvice ? "advice" : "WRONG ";
    out += fmt::format("{}  {:<{}}  {}\n", mark, f.check, width, f.value);
    if (f.level == DoctorLevel::kFine) continue;
    out += fmt::format("{:<{}}should be: {}\n", "", width + 10, f.should);
    out += fmt::format("{:<{}}to change: {}\n", "", width + 10, f.change);
  }
  return out;
}

nlohmann::json DoctorJson(const std::vector<DoctorFinding>& findings) {
  nlohmann::json list = nlohmann::json::array();
  for (const DoctorFinding& f : findings)
    list.push_back({{"check", f.check},
                    {"level", LevelName(f.level)},
                    {"value", f.value},
                    {"should", f.should},
                    {"change", f.change}});
  return {{"ok", !AnyWrong(findings)}, {"findings", std::move(list)}};
}

}  // namespace spl::cli

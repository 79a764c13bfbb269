// What `splice doctor` looks at: facts about this machine, read and never changed. Judging them is doctor_checks.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace spl::cli {

struct DoctorOptions {
  std::string backend = "auto";            // "cuda": GPUs are required, "cpu": they are not looked at
  std::string model_dir;                   // empty: not looked at
  std::string data_dir;                    // of the chunk store; empty: not looked at
  uint64_t store_disk_bytes = 8ull << 30;  // that it is to hold
  uint64_t kv_bytes = 1ull << 30;          // of each of the two page pools
  std::vector<std::string> listen = {"127.0.0.1:8000", "127.0.0.1:8001"};  // HOST:PORT that programs will listen on
  std::string kv_listen_host = "127.0.0.1";                                // where the KV transport is tried out
  std::string router;   // URL of a running router: clocks are compared; empty: they are not
  std::string api_key;  // of an operator, for that
  std::string ca_file;  // of its certificate; empty: the system's CAs
};

// The empty string of an error means that all is well.
struct LibraryFact {
  std::string name;
  std::string needed_for;
  std::string error;  // it could not be opened: what the loader says
};

struct GpuFact {
  int index = 0;
  std::string name;
  uint64_t total_bytes = 0, free_bytes = 0;
  int compute_major = 0, compute_minor = 0;
  std::optional<bool> ecc, persistence;  // nothing: the driver does not say
};

struct NicFact {
  std::string name;
  bool up = false;
  std::optional<int64_t> megabits_per_s;  // nothing: it has no line, as virtual ones
};

// One way of the KV transport from this process to itself.
struct TransferFact {
  std::string asked;    // "auto", "tcp"
  std::string carrier;  // what was chosen
  double bytes_per_s = 0;
  std::string error;
};

struct ClockFact {
  std::string program;
  std::string error;                 // it did not answer, or does not tell
  double offset_s = 0, bound_s = 0;  // ahead of this machine, give or take
};

struct PortFact {
  std::string address;
  std::string error;  // it cannot be listened on
};

struct DoctorFacts {
  // Of the build.
  int build_cuda_major = 0;         // 0: without GPUs
  std::string build_architectures;  // as CMake names them, "80-real,90a-real"

  // Of the driver; versions are CUDA's, 1000 * major + 10 * minor.
  std::string driver_version;  // empty: none
  int driver_cuda_version = 0;
  std::vector<LibraryFact> libraries;
  std::vector<GpuFact> gpus;

  std::string cpu_isa;  // CpuIsaName
  bool cpu_bf16 = false;
  int num_cpus = 0;

  std::vector<NicFact> nics;
  std::vector<std::string> rdma_devices;
  std::map<std::string, std::string> ucx_environment;
  double memcpy_bytes_per_s = 0;
  std::vector<TransferFact> transfers;

  std::vector<ClockFact> clocks;

  uint64_t open_files = 0;  // soft limits; UINT64_MAX: none
  uint64_t open_files_hard = 0;
  uint64_t locked_bytes = 0;
  std::string transparent_huge_pages;      // "always", "madvise", "never"; empty: the kernel does not say
  std::optional<uint64_t> shm_free_bytes;  // of /dev/shm; nothing: there is none
  uint64_t memory_available_bytes = 0;

  std::vector<PortFact> ports;

  struct Model {
    std::string dir;
    std::string error;
    uint64_t weight_bytes = 0;
    bool has_tokenizer = false;
    std::string tokenizer_error;
  };
  std::optional<Model> model;

  struct Disk {
    std::string dir;  // the nearest folder above that exists
    std::string error;
    uint64_t free_bytes = 0;
  };
  std::optional<Disk> disk;
};

// Takes a second or two, most of it for moving bytes. Opens no GPU context, writes no file.
DoctorFacts CollectDoctorFacts(const DoctorOptions& options);

}  // namespace spl::cli

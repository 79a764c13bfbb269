// Every check of `splice doctor` on facts that are given, and the facts of this machine once.
#include "tools/cli/doctor_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>

#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr uint64_t kGiB = 1ull << 30;

// A machine on which nothing is to be done.
DoctorFacts Healthy() {
  DoctorFacts f;
  f.build_cuda_major = 13;
  f.build_architectures = "80-real,90a-real";
  f.driver_version = "580.65";
  f.driver_cuda_version = 13000;
  f.libraries = {{"libcublasLt.so.13", "", ""}, {"libnccl.so.2", "models on several GPUs (--tp)", ""}};
  f.gpus = {{0, "H200", 141 * kGiB, 140 * kGiB, 9, 0, true, true}};
  f.cpu_isa = "avx512";
  f.cpu_bf16 = true;
  f.num_cpus = 16;
  f.nics = {{"eth0", true, 10'000}};
  f.memcpy_bytes_per_s = 12e9;
  f.transfers = {{"auto", "shm", 11e9, ""}, {"tcp", "tcp", 3e9, ""}};
  f.clocks = {{"router", "", 0.002, 0.004}};
  f.open_files = f.open_files_hard = 1 << 20;
  f.locked_bytes = 8 << 20;
  f.transparent_huge_pages = "madvise";
  f.shm_free_bytes = 16 * kGiB;
  f.memory_available_bytes = 64 * kGiB;
  f.ports = {{"127.0.0.1:8000", ""}};
  f.model = DoctorFacts::Model{"models/tiny", "", kGiB, "bf16", true, ""};
  f.disk = DoctorFacts::Disk{"/var/lib/splice", "", 100 * kGiB};
  return f;
}

DoctorFinding FindingOf(const std::vector<DoctorFinding>& findings, const std::string& check) {
  for (const DoctorFinding& f : findings) {
    if (f.check == check) return f;
  }
  ADD_FAILURE() << "no finding " << check << " in\n" << DoctorTable(findings);
  return {};
}

// The finding after `change` of a healthy machine, where it is the only one that is not fine.
DoctorFinding After(const std::function<void(DoctorFacts&)>& change, const std::string& check,
                    const DoctorOptions& options = {}) {
  DoctorFacts facts = Healthy();
  change(facts);
  const auto findings = JudgeDoctorFacts(facts, options);
  for (const DoctorFinding& f : findings) {
    if (f.check != check) {
      EXPECT_EQ(f.level, DoctorLevel::kFine) << f.check << ": " << f.value;
    }
    if (f.level != DoctorLevel::kFine) {
      EXPECT_THAT(f.should, Not(IsEmpty())) << f.check;
      EXPECT_THAT(f.change, Not(IsEmpty())) << f.check;
    }
  }
  const DoctorFinding finding = FindingOf(findings, check);
  EXPECT_EQ(AnyWrong(findings), finding.level == DoctorLevel::kWrong);
  return finding;
}

TEST(DoctorChecksTest, AHealthyMachineIsFine) {
  const auto findings = JudgeDoctorFacts(Healthy(), {});
  for (const DoctorFinding& f : findings) EXPECT_EQ(f.level, DoctorLevel::kFine) << f.check << ": " << f.value;
  EXPECT_GE(findings.size(), 15U);
  EXPECT_FALSE(AnyWrong(findings));
  EXPECT_EQ(DoctorJson(findings)["ok"], true);
}

TEST(DoctorChecksTest, Driver) {
  EXPECT_EQ(After([](auto& f) { f.driver_cuda_version = 12080; }, "driver").level, DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.driver_cuda_version = 13010; }, "driver").level, DoctorLevel::kFine);
  const auto none = [](DoctorFacts& f) {
    f.driver_version = "";
    f.gpus.clear();
  };
  EXPECT_EQ(After(none, "driver").level, DoctorLevel::kAdvice);  // the CPU will be used
  EXPECT_EQ(After(none, "driver", {.backend = "cuda"}).level, DoctorLevel::kWrong);
  EXPECT_EQ(After(none, "gpu", {.backend = "cpu"}).level, DoctorLevel::kFine);
  EXPECT_EQ(After([](auto& f) { f.build_cuda_major = 0; }, "gpu", {.backend = "cuda"}).level, DoctorLevel::kWrong);
}

TEST(DoctorChecksTest, Libraries) {
  const DoctorFinding missing =
      After([](auto& f) { f.libraries[0].error = "cannot open"; }, "library libcublasLt.so.13");
  EXPECT_EQ(missing.level, DoctorLevel::kWrong);
  EXPECT_THAT(missing.change, HasSubstr("SPLICE_CUDA_LIBS"));
  // Needed by some only.
  EXPECT_EQ(After([](auto& f) { f.libraries[1].error = "cannot open"; }, "library libnccl.so.2").level,
            DoctorLevel::kAdvice);
}

TEST(DoctorChecksTest, Gpus) {
  const auto level = [](int major, int minor, const char* architectures) {
    return After(
               [&](auto& f) {
                 f.gpus[0].compute_major = major;
                 f.gpus[0].compute_minor = minor;
                 f.build_architectures = architectures;
               },
               "gpu 0")
        .level;
  };
  EXPECT_EQ(level(9, 0, "80-real,90a-real"), DoctorLevel::kFine);
  EXPECT_EQ(level(8, 6, "80-real,90a-real"), DoctorLevel::kFine);  // the same major version
  EXPECT_EQ(level(7, 5, "80-real,90a-real"), DoctorLevel::kWrong);
  EXPECT_EQ(level(10, 0, "80-real,90a-real"), DoctorLevel::kWrong);
  EXPECT_EQ(level(10, 0, "80"), DoctorLevel::kFine);  // PTX
  EXPECT_EQ(level(8, 0, "86-real"), DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.gpus[0].ecc = false; }, "gpu 0").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.gpus[0].ecc = std::nullopt; }, "gpu 0").level, DoctorLevel::kFine);
  EXPECT_EQ(After([](auto& f) { f.gpus[0].persistence = false; }, "gpu 0").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.gpus[0].free_bytes = kGiB / 2; }, "gpu 0").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.gpus.clear(); }, "gpu", {.backend = "cuda"}).level, DoctorLevel::kWrong);
}

TEST(DoctorChecksTest, Cpu) {
  EXPECT_EQ(After([](auto& f) { f.cpu_isa = "portable"; }, "cpu").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.cpu_bf16 = false; }, "cpu").level, DoctorLevel::kFine);  // GPUs compute
}

TEST(DoctorChecksTest, Transfers) {
  EXPECT_EQ(After([](auto& f) { f.transfers[0].bytes_per_s = 1e9; }, "transfer auto").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.transfers[0].carrier = "tcp"; }, "transfer auto").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.transfers[1].bytes_per_s = 0.1e9; }, "transfer tcp").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.transfers[1].error = "no listener"; }, "transfer tcp").level, DoctorLevel::kWrong);
  // 100 Gbit/s are more than TCP moves here.
  const DoctorFinding line = After([](auto& f) { f.nics[0].megabits_per_s = 100'000; }, "transfer tcp");
  EXPECT_EQ(line.level, DoctorLevel::kAdvice);
  EXPECT_THAT(line.should, HasSubstr("12.5 GB/s"));
  EXPECT_EQ(After(
                [](auto& f) {
                  f.nics[0].megabits_per_s = 100'000;
                  f.nics[0].up = false;
                },
                "transfer tcp")
                .level,
            DoctorLevel::kFine);
}

TEST(DoctorChecksTest, UcxEnvironment) {
  const auto level = [](const char* name, const char* value) {
    return After([&](auto& f) { f.ucx_environment[name] = value; }, std::string("environment ") + name).level;
  };
  EXPECT_EQ(level("UCX_TLS", "shm"), DoctorLevel::kWrong);
  EXPECT_EQ(level("UCX_TLS", "tcp,shm"), DoctorLevel::kFine);
  EXPECT_EQ(level("UCX_TLS", "all"), DoctorLevel::kFine);
  EXPECT_EQ(level("UCX_TLS", "^ib"), DoctorLevel::kFine);
  EXPECT_EQ(level("UCX_PROTO_ENABLE", "y"), DoctorLevel::kWrong);
  EXPECT_EQ(level("UCX_NET_DEVICES", "eth0"), DoctorLevel::kFine);
}

TEST(DoctorChecksTest, LockedMemoryMattersToRdma) {
  const auto rdma = [](uint64_t limit) {
    return After(
               [&](auto& f) {
                 f.rdma_devices = {"mlx5_0"};
                 f.locked_bytes = limit;
               },
               "locked memory")
        .level;
  };
  EXPECT_EQ(rdma(8 << 20), DoctorLevel::kWrong);
  EXPECT_EQ(rdma(UINT64_MAX), DoctorLevel::kFine);
}

TEST(DoctorChecksTest, Clocks) {
  const auto level = [](double offset_s, double bound_s) {
    return After([&](auto& f) { f.clocks.push_back({"p0", "", offset_s, bound_s}); }, "clock p0").level;
  };
  EXPECT_EQ(level(-0.05, 0.001), DoctorLevel::kFine);
  EXPECT_EQ(level(-0.5, 0.001), DoctorLevel::kAdvice);
  EXPECT_EQ(level(0.5, 0.45), DoctorLevel::kFine);  // it may be the answer that took long
  EXPECT_EQ(level(-60, 0.01), DoctorLevel::kWrong);
  EXPECT_EQ(After(
                [](auto& f) {
                  f.clocks.push_back({"p0", "no answer", 0, 0});
                },
                "clock p0")
                .level,
            DoctorLevel::kAdvice);
}

TEST(DoctorChecksTest, Limits) {
  EXPECT_EQ(After([](auto& f) { f.open_files = 1024; }, "open files").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.open_files = 256; }, "open files").level, DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.open_files = UINT64_MAX; }, "open files").level, DoctorLevel::kFine);
  EXPECT_EQ(After([](auto& f) { f.transparent_huge_pages = "never"; }, "huge pages").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.shm_free_bytes = 64 << 20; }, "/dev/shm").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.shm_free_bytes = std::nullopt; }, "/dev/shm").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.shm_free_bytes = 12 * kGiB; }, "/dev/shm", {.kv_bytes = 16 * kGiB}).level,
            DoctorLevel::kAdvice);
  const auto on_the_cpu = [](DoctorFacts& f) {
    f.gpus.clear();
    f.memory_available_bytes = kGiB + kGiB / 2;  // the pool, and half of the weights
  };
  EXPECT_EQ(FindingOf(JudgeDoctorFacts(
                          [&] {
                            DoctorFacts f = Healthy();
                            on_the_cpu(f);
                            return f;
                          }(),
                          {.kv_bytes = kGiB}),
                      "memory")
                .level,
            DoctorLevel::kWrong);
}

// Without --kv-bytes it says what the pool would hold.
TEST(DoctorChecksTest, KvPool) {
  DoctorFacts f = Healthy();
  f.model->max_context = 131'072;
  f.model->sequence_bytes = 16 * kGiB;
  DoctorFinding pools = FindingOf(JudgeDoctorFacts(f, {}), "kv pool");
  EXPECT_EQ(pools.level, DoctorLevel::kFine);
  EXPECT_THAT(pools.value, StartsWith("auto: 1")) << "140 GiB, less weights, workspace and 6 %";
  EXPECT_EQ(FindingOf(JudgeDoctorFacts(f, {.kv_bytes = 8 * kGiB}), "kv pool").level, DoctorLevel::kAdvice);
  f.gpus[0].free_bytes = 20 * kGiB;  // another process has the rest
  pools = FindingOf(JudgeDoctorFacts(f, {}), "kv pool");
  EXPECT_EQ(pools.level, DoctorLevel::kAdvice);
  EXPECT_THAT(pools.should, HasSubstr("131072 tokens"));
  f.gpus[0].free_bytes = 4 * kGiB;
  pools = FindingOf(JudgeDoctorFacts(f, {}), "kv pool");
  EXPECT_EQ(pools.level, DoctorLevel::kWrong);
  EXPECT_THAT(pools.value, HasSubstr("--kv-bytes auto"));
  f.gpus.clear();
  f.memory_available_bytes = 31 * kGiB;  // on the CPU half of what the weights leave, for a sequence that does not fit
  pools = FindingOf(JudgeDoctorFacts(f, {}), "kv pool");
  EXPECT_EQ(pools.level, DoctorLevel::kAdvice);
  EXPECT_THAT(pools.value, HasSubstr("15.0 GiB (122880 tokens)"));
}

TEST(DoctorChecksTest, PortsModelAndDisk) {
  EXPECT_EQ(After([](auto& f) { f.ports[0].error = "Address already in use"; }, "port 127.0.0.1:8000").level,
            DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.model->tokenizer_error = "no merges"; }, "tokenizer").level, DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.model->has_tokenizer = false; }, "tokenizer").level, DoctorLevel::kAdvice);
  EXPECT_EQ(After([](auto& f) { f.disk->free_bytes = kGiB; }, "store disk").level, DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.disk->free_bytes = kGiB; }, "store disk", {.store_disk_bytes = kGiB}).level,
            DoctorLevel::kFine);
  EXPECT_EQ(After([](auto& f) { f.disk->error = "Permission denied"; }, "store disk").level, DoctorLevel::kWrong);
  EXPECT_EQ(After([](auto& f) { f.model->error = "no config.json"; }, "model").level, DoctorLevel::kWrong);
}

TEST(DoctorChecksTest, TableAndJsonSayTheSame) {
  DoctorFacts facts = Healthy();
  facts.open_files = 256;
  const auto findings = JudgeDoctorFacts(facts, {});
  const std::string table = DoctorTable(findings);
  EXPECT_THAT(table, HasSubstr("WRONG   open files"));
  EXPECT_THAT(table, HasSubstr("to change: ulimit -n"));
  const nlohmann::json json = DoctorJson(findings);
  EXPECT_EQ(json["ok"], false);
  for (const auto& f : json["findings"]) {
    EXPECT_THAT(table, HasSubstr(f["value"].get<std::string>()));
    EXPECT_EQ(f["level"] == "fine", f["change"] == "");
  }
}

TEST(DoctorFactsTest, OfThisMachine) {
  const testing::TempDir dir;
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  socklen_t length = sizeof(address);
  getsockname(taken, reinterpret_cast<sockaddr*>(&address), &length);
  const std::string busy = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const DoctorFacts facts = CollectDoctorFacts({.model_dir = "models/splice-tiny",
                                                .data_dir = dir.path() + "/not/there/yet",
                                                .listen = {"127.0.0.1:0", busy, "no-such-host.invalid:80"}});
  close(taken);
  EXPECT_GT(facts.num_cpus, 0);
  EXPECT_GT(facts.memory_available_bytes, 0U);
  EXPECT_GT(facts.memcpy_bytes_per_s, 0.1e9);
  ASSERT_EQ(facts.transfers.size(), 2U);
  for (const TransferFact& transfer : facts.transfers) {
    EXPECT_EQ(transfer.error, "");
    EXPECT_GT(transfer.bytes_per_s, 0.01e9) << transfer.asked;
    EXPECT_THAT(transfer.carrier, Not(IsEmpty()));
  }
  EXPECT_EQ(facts.transfers[1].carrier, "tcp");
  ASSERT_TRUE(facts.model.has_value());
  EXPECT_EQ(facts.model->error, "");
  EXPECT_EQ(facts.model->tokenizer_error, "");
  EXPECT_GT(facts.model->weight_bytes, 1'000'000U);
  ASSERT_TRUE(facts.disk.has_value());
  EXPECT_EQ(facts.disk->dir, dir.path());
  EXPECT_GT(facts.disk->free_bytes, 0U);
  ASSERT_EQ(facts.ports.size(), 3U);
  EXPECT_EQ(facts.ports[0].error, "");
  EXPECT_THAT(facts.ports[1].error, HasSubstr("in use"));
  EXPECT_THAT(facts.ports[2].error, Not(IsEmpty()));
}

TEST(DoctorFactsTest, ABrokenModelIsSaidToBeOne) {
  const testing::TempDir dir;
  std::ofstream(dir.path() + "/config.json") << "{";
  const DoctorFacts facts = CollectDoctorFacts({.backend = "cpu", .model_dir = dir.path(), .listen = {}});
  EXPECT_THAT(facts.model->error, Not(IsEmpty()));
}

}  // namespace
}  // namespace spl::cli

// splice doctor: tells whether this machine is fit to run Splice, and the changes it needs.
#include <fmt/format.h>

#include <memory>

#include "services/base/byte_size_option.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "tools/cli/command.h"
#include "tools/cli/doctor_checks.h"
#include "tools/cli/endpoint.h"

namespace spl::cli {
namespace {

struct Flags {
  DoctorOptions options;
  std::string http = "127.0.0.1:8000", grpc = "127.0.0.1:8001";
  bool json = false;
};

absl::Status RunDoctor(const Flags& flags) {
  SPLICE_RETURN_IF_ERROR(log::SetLevel("error"));
  DoctorOptions options = flags.options;
  options.listen.clear();
  for (const std::string& address : {flags.http, flags.grpc}) {
    if (!address.empty()) options.listen.push_back(address);
  }
  const std::vector<DoctorFinding> findings = JudgeDoctorFacts(CollectDoctorFacts(options), options);
  if (flags.json)
    fmt::print("{}\n", DoctorJson(findings).dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    fmt::print("{}", DoctorTable(findings));
  if (!AnyWrong(findings)) return absl::OkStatus();
  return absl::FailedPreconditionError("something must be changed, see above");
}

}  // namespace

Command MakeDoctorCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand(
      "doctor", "Checks driver, GPUs, network, limits, ports, model and disk of this machine; says what to change");
  app.footer(
      "Example:\n"
      "  splice doctor --model models/splice-tiny --data-dir /var/lib/splice\n"
      "  splice doctor --json --router http://router:8000 --api-key \"$OPERATOR_KEY\"\n\n"
      "Exit code: 0 fine (there may be advice), 1 something must be changed. Changes nothing itself.");
  DoctorOptions& o = flags->options;
  app.add_option("--backend", o.backend, "auto, cpu (GPUs are not checked) or cuda (GPUs are required)")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--model", o.model_dir,
                 "model folder, or ORG/NAME of a model on this machine: is it readable and whole")
      ->type_name("DIR|ORG/NAME");
  app.add_option("--data-dir", o.data_dir, "data folder of the chunk store; checked for write access and free space");
  AddByteSizeOption(app, "--store-disk-bytes", o.store_disk_bytes,
                    "expected size of the disk tier; checked against free space");
  AddByteSizeOrAutoOption(
      app, "--kv-bytes", o.kv_bytes,
      "size of each of the two KV page pools; auto: with --model the size that splice serve would take");
  app.add_option("--http", flags->http, "HOST:PORT that the router will listen on; empty: not checked")
      ->capture_default_str();
  app.add_option("--grpc", flags->grpc, "HOST:PORT of the gRPC API; empty: not checked")->capture_default_str();
  app.add_option("--kv-listen-host", o.kv_listen_host, "address that KV is moved over, from this machine to itself")
      ->capture_default_str();
  app.add_option("--router", o.router, "URL of a running router: its clock and those of its workers are compared");
  app.add_option("--api-key", o.api_key, "an operator's key for --router; also from SPLICE_API_KEY")
      ->envname("SPLICE_API_KEY");
  AddCaFlag(app, o.ca_file);
  app.add_flag("--json", flags->json, "print the findings as JSON");
  return {&app, [flags] { return RunDoctor(*flags); }};
}

}  // namespace spl::cli

#include "services/membership/etcd_access.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <CLI/App.hpp>
#include <fstream>

#include "etcd/v3/rpc.grpc.pb.h"
#include "services/base/certificate_files.h"
#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/status.h"

namespace spl::membership {
namespace {

namespace etcd = etcdserverpb;

absl::StatusOr<std::string> ReadPassword(const std::string& file) {
  std::ifstream in(file);
  std::string password;
  if (!in || !std::getline(in, password))
    return Errorf(absl::StatusCode::kFailedPrecondition, "--etcd-password-file {} cannot be read, or is empty", file);
  if (password.ends_with('\r')) password.pop_back();
  return password;
}

}  // namespace

void EtcdAccessOptions::Register(CLI::App& app) {
  app.add_option("--etcd-ca", ca_file, "CA certificates (PEM) that signed etcd's certificate; turns on TLS to etcd");
  app.add_option("--etcd-cert", cert_file, "Client certificate (PEM) for etcd");
  app.add_option("--etcd-key", key_file, "Private key (PEM) of --etcd-cert");
  app.add_option("--etcd-user", user, "User name for etcd");
  app.add_option("--etcd-password-file", password_file, "File with the password of --etcd-user");
}

absl::Status EtcdAccessOptions::Check() const {
  if (cert_file.empty() != key_file.empty())
    return absl::InvalidArgumentError("--etcd-cert and --etcd-key: give both, or none");
  if (!cert_file.empty() && ca_file.empty())
    return absl::InvalidArgumentError("--etcd-cert needs --etcd-ca: without it connections are not encrypted");
  if (user.empty() != password_file.empty())
    return absl::InvalidArgumentError("--etcd-user and --etcd-password-file: give both, or none");
  if (!ca_file.empty()) SPLICE_RETURN_IF_ERROR(ReadCaFile("--etcd-ca", ca_file).status());
  if (!cert_file.empty()) {
    SPLICE_RETURN_IF_ERROR(ReadCertificateFiles({"--etcd-cert", cert_file, "--etcd-key", key_file}).status());
  }
  if (user.empty()) return absl::OkStatus();
  if (ca_file.empty()) {
    log::Warning("membership.etcd_password_in_clear",
                 log::F("hint", "without --etcd-ca the password travels as it is: encrypt the connection otherwise"));
  }
  const absl::Status password = ReadPassword(password_file).status();
  return password.ok() ? password : absl::InvalidArgumentError(password.message());
}

std::shared_ptr<grpc::Channel> MakeEtcdChannel(const std::string& endpoint, const EtcdAccessOptions& access,
                                               const grpc::ChannelArguments& arguments) {
  if (access.ca_file.empty()) return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
  using Provider = grpc::experimental::FileWatcherCertificateProvider;
  const auto refresh = static_cast<unsigned>(access.refresh.count());
  grpc::experimental::TlsChannelCredentialsOptions options;
  if (access.cert_file.empty()) {
    options.set_certificate_provider(std::make_shared<Provider>(access.ca_file, refresh));
  } else {
    options.set_certificate_provider(
        std::make_shared<Provider>(access.key_file, access.cert_file, access.ca_file, refresh));
    options.watch_identity_key_cert_pairs();
  }
  options.watch_root_certs();
  return grpc::CreateCustomChannel(endpoint, grpc::experimental::TlsCredentials(options), arguments);
}

absl::Status EtcdToken::Get(grpc::ClientContext& context, const std::shared_ptr<grpc::Channel>& channel) {
  SPLICE_ASSIGN_OR_RETURN(std::string password, ReadPassword(access_.password_file));
  etcd::AuthenticateRequest request;
  request.set_name(access_.user);
  request.set_password(std::move(password));
  etcd::AuthenticateResponse response;
  const absl::Status status = FromGrpcStatus(etcd::Auth::NewStub(channel)->Authenticate(&context, request, &response));
  if (!status.ok()) return Annotate(status, "user " + access_.user);
  token_ = response.token();
  return absl::OkStatus();
}

void EtcdToken::AddTo(grpc::ClientContext& context) const {
  if (!token_.empty()) context.AddMetadata("token", token_);
}

bool EtcdToken::Rejected(const absl::Status& status) {
  // InvalidArgument: "revision of auth store is old".
  const bool rejected = !token_.empty() && (absl::IsUnauthenticated(status) || absl::IsInvalidArgument(status));
  if (rejected) token_.clear();
  return rejected;
}

}  // namespace spl::membership

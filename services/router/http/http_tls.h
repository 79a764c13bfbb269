// The certificate of the HTTP API; it may be replaced while serving.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/certificate_files.h"
#include "services/base/tls_stream.h"

namespace spl::router {

// Thread-safe.
class HttpTls {
 public:
  // InvalidArgument as ReadCertificateFiles and MakeHttpsServerContext.
  static absl::StatusOr<std::shared_ptr<HttpTls>> Load(const CertificateFiles& files);

  // The TLS context for new connections.
  std::shared_ptr<TlsContext> context() const;
  std::chrono::system_clock::time_point valid_until() const;

  // Reads the files again. True: they hold another certificate, which is used from now on. An error, returned once per
  // new reason, leaves the certificate as it was. Cost: reads two small files. One caller at a time.
  absl::StatusOr<bool> ReloadIfChanged();

 private:
  HttpTls(CertificateFiles files, Certificate certificate, std::shared_ptr<TlsContext> context)
      : files_(std::move(files)), certificate_(std::move(certificate)), context_(std::move(context)) {}

  const CertificateFiles files_;
  std::string refused_;  // the last error; used by ReloadIfChanged only
  mutable std::mutex mutex_;
  Certificate certificate_;              // guarded by mutex_
  std::shared_ptr<TlsContext> context_;  // guarded by mutex_
};

}  // namespace spl::router

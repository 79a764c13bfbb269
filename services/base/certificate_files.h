// Certificates, private keys and CAs in PEM files: read and checked before a program serves or calls with them.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl {

// A certificate and its key, and the flags that name the files; messages name both.
struct CertificateFiles {
  std::string cert_flag, cert_file;
  std::string key_flag, key_file;
};

struct Certificate {
  std::string chain_pem;  // the whole file: the certificate, then the intermediates up to its CA
  std::string key_pem;
  std::chrono::system_clock::time_point valid_until;
  std::string valid_until_text;  // the same in words
};

// Reads both files once and returns exactly the bytes that it checked. InvalidArgument names flag and file: a file
// cannot be read or is not PEM, the key asks for a passphrase, the two do not belong together, or the certificate is
// not valid now.
absl::StatusOr<Certificate> ReadCertificateFiles(const CertificateFiles& files);

// Returns the contents of the file. InvalidArgument: it cannot be read, or does not begin with a certificate.
absl::StatusOr<std::string> ReadCaFile(const std::string& flag, const std::string& file);

}  // namespace spl

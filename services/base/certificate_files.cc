#include "services/base/certificate_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>

#include "services/base/status.h"

namespace spl {
namespace {

// Far above any chain or bundle of CAs: a wrong path must not be read into memory whole.
constexpr size_t kMaxFileBytes = 4 << 20;

template <auto Free>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Bio = std::unique_ptr<BIO, FreeWith<BIO_free_all>>;
using X509Ptr = std::unique_ptr<X509, FreeWith<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;
struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// OpenSSL's queue of errors is per thread: errors that are left in it would be reported as the reason of a later
// failure.
std::string LastOpenSslError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  const std::string text = reason == nullptr ? "unknown reason" : reason;
  ERR_clear_error();
  return text;
}

absl::StatusOr<std::string> ReadFile(const std::string& flag, const std::string& path) {
  const File file(std::fopen(path.c_str(), "rbe"));
  if (file == nullptr) return InvalidArgument("{} {} cannot be read: {}", flag, path, std::strerror(errno));
  std::string text;
  char piece[16384];
  size_t size;
  while ((size = std::fread(piece, 1, sizeof(piece), file.get())) > 0) {
    text.append(piece, size);
    if (text.size() > kMaxFileBytes) return InvalidArgument("{} {} is larger than {} bytes", flag, path, kMaxFileBytes);
  }
  if (std::ferror(file.get()) != 0)
    return InvalidArgument("{} {} cannot be read: {}", flag, path, std::strerror(errno));
  return text;
}

Bio BioOf(const std::string& text) { return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

absl::StatusOr<X509Ptr> ParseCertificate(const std::string& flag, const std::string& file, const std::string& pem) {
  X509Ptr certificate(PEM_read_bio_X509(BioOf(pem).get(), nullptr, nullptr, nullptr));
  if (certificate == nullptr)
    return InvalidArgument("{} {} holds no certificate in PEM: {}", flag, file, LastOpenSslError());
  return certificate;
}

absl::StatusOr<Key> ParseKey(const std::string& flag, const std::string& file, const std::string& pem) {
  // With an empty passphrase a protected key is an error, instead of a question on the terminal.
  char no_passphrase[] = "";
  Key key(PEM_read_bio_PrivateKey(BioOf(pem).get(), nullptr, nullptr, no_passphrase));
  if (key == nullptr)
    return InvalidArgument("{} {} holds no unprotected private key in PEM: {}", flag, file, LastOpenSslError());
  return key;
}

std::string TimeText(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  char* text = nullptr;
  if (bio == nullptr || ASN1_TIME_print(bio.get(), time) != 1) return "?";
  const long length = BIO_get_mem_data(bio.get(), &text);
  return std::string(text, static_cast<size_t>(length));
}

}  // namespace

absl::StatusOr<Certificate> ReadCertificateFiles(const CertificateFiles& files) {
  Certificate read;
  SPLICE_ASSIGN_OR_RETURN(read.chain_pem, ReadFile(files.cert_flag, files.cert_file));
  SPLICE_ASSIGN_OR_RETURN(const X509Ptr certificate,
                          ParseCertificate(files.cert_flag, files.cert_file, read.chain_pem));
  SPLICE_ASSIGN_OR_RETURN(read.key_pem, ReadFile(files.key_flag, files.key_file));
  SPLICE_ASSIGN_OR_RETURN(const Key key, ParseKey(files.key_flag, files.key_file, read.key_pem));
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    return InvalidArgument("{} {} is not the key of the certificate {} {}", files.key_flag, files.key_file,
                           files.cert_flag, files.cert_file);
  }
  const ASN1_TIME *begin = X509_get0_notBefore(certificate.get()), *end = X509_get0_notAfter(certificate.get());
  if (X509_cmp_current_time(end) < 0)
    return InvalidArgument("{} {} has expired: it was valid until {}", files.cert_flag, files.cert_file, TimeText(end));
  if (X509_cmp_current_time(begin) > 0)
    return InvalidArgument("{} {} is not valid before {}: is the clock right?", files.cert_flag, files.cert_file,
                           TimeText(begin));
  std::tm utc{};
  if (ASN1_TIME_to_tm(end, &utc) == 1) read.valid_until = std::chrono::system_clock::from_time_t(timegm(&utc));
  read.valid_until_text = TimeText(end);
  return read;
}

absl::StatusOr<std::string> ReadCaFile(const std::string& flag, const std::string& file) {
  SPLICE_ASSIGN_OR_RETURN(std::string pem, ReadFile(flag, file));
  SPLICE_RETURN_IF_ERROR(ParseCertificate(flag, file, pem).status());
  return pem;
}

}  // namespace spl

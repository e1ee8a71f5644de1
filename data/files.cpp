// Whole files, on POSIX calls: C++ streams can neither map nor sync, and hide the reason of a failure.
#include "data/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>

#include "kernels/error.h"

namespace {

constexpr size_t read_bytes = size_t{1} << 20;   // of one read
constexpr size_t write_bytes = size_t{1} << 30;  // of one write: some systems refuse 2^31

// A file descriptor that is closed when its scope ends, also by an exception.
struct Descriptor {
    int fd;

    explicit Descriptor(int opened) : fd(opened) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

[[noreturn]] void fail_errno(const std::string& path, const char* what) {
    fail("cannot %s %s: %s", what, path.c_str(), strerror(errno));
}

// A system call that a signal interrupts before it did anything has to be made again.
template <typename Call>
auto retry(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

}  // namespace

MappedFile file_map(const std::string& path, const std::string& flag) {
    const std::string name = flag.empty() ? path : flag + " " + path;
    // Looked at before it is opened: opening a pipe would wait for its writer.
    struct stat info;
    if (stat(path.c_str(), &info) != 0) fail("%s: %s", name.c_str(), strerror(errno));
    if (S_ISDIR(info.st_mode)) fail("%s: is a folder, not a file", name.c_str());
    if (!S_ISREG(info.st_mode)) fail("%s: is not a regular file", name.c_str());
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (file.fd < 0 || fstat(file.fd, &info) != 0) fail("%s: %s", name.c_str(), strerror(errno));

    const size_t bytes = static_cast<size_t>(info.st_size);
    if (bytes == 0) return {};  // mmap refuses a length of 0
    void* memory = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (memory == MAP_FAILED) fail("%s: cannot map %zu bytes: %s", name.c_str(), bytes, strerror(errno));
    const auto unmap = [bytes](const char* data) { munmap(const_cast<char*>(data), bytes); };
    return {{static_cast<const char*>(memory), unmap}, bytes};
}

bool file_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

FileWriter::FileWriter(const std::string& name) : path(name) {
    descriptor = retry([&] { return open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); });
    if (descriptor < 0) fail_errno(path, "create");
}

FileWriter::~FileWriter() {
    if (descriptor < 0) return;
    close(descriptor);
    unlink(path.c_str());
}

void file_append(FileWriter& file, const void* data, size_t bytes) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {  // a write may take less than it is given
        const ssize_t written =
            retry([&] { return write(file.descriptor, next, std::min(bytes, write_bytes)); });
        if (written < 0) fail_errno(file.path, "write");
        next += written;
        bytes -= static_cast<size_t>(written);
    }
}

void file_commit(FileWriter& file) {
    if (retry([&] { return fsync(file.descriptor); }) != 0) fail_errno(file.path, "sync");
    const int descriptor = file.descriptor;
    file.descriptor = -1;
    if (close(descriptor) != 0 && errno != EINTR) fail_errno(file.path, "close");
}

void folder_sync(const std::string& path) {
    const Descriptor folder(retry([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (folder.fd < 0) fail_errno(path, "open");
    // EINVAL: a file system that has no such operation keeps its folders in order by itself.
    if (retry([&] { return fsync(folder.fd); }) != 0 && errno != EINVAL) fail_errno(path, "sync");
}

void file_read(const std::string& path, const std::function<void(std::string_view)>& take) {
    const Descriptor file(retry([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
    if (file.fd < 0) fail_errno(path, "open");
    std::vector<char> buffer(read_bytes);
    while (true) {
        const ssize_t got = retry([&] { return read(file.fd, buffer.data(), buffer.size()); });
        if (got < 0) fail_errno(path, "read");
        if (got == 0) return;
        take({buffer.data(), static_cast<size_t>(got)});
    }
}

void file_write(const std::string& path, const std::vector<std::string_view>& parts) {
    const std::string temporary = path + ".tmp";
    FileWriter file(temporary);
    for (const std::string_view part : parts) file_append(file, part.data(), part.size());
    file_commit(file);
    if (rename(temporary.c_str(), path.c_str()) != 0) {
        const int reason = errno;
        unlink(temporary.c_str());
        errno = reason;
        fail_errno(path, "write");
    }
    const std::string folder = std::filesystem::path(path).parent_path();
    folder_sync(folder.empty() ? "." : folder);  // the rename itself lasts only once the folder is on disk
}

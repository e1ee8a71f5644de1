// Whole files, on POSIX calls: C++ streams can neither map nor sync, and hide the reason of a failure.
#include "data/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "kernels/error.h"

namespace {

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

// Writes, syncs and closes; false with errno set if a step fails. close() reports late errors of network
// file systems, so it counts.
bool write_synced(const std::string& path, const std::vector<std::string_view>& parts) {
    Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (file.fd < 0) return false;
    for (std::string_view rest : parts) {
        while (!rest.empty()) {
            // Linux writes at most 2^31 - 4096 bytes a call, and fewer when a signal arrives.
            const ssize_t written = write(file.fd, rest.data(), rest.size());
            if (written < 0 && errno != EINTR) return false;
            if (written > 0) rest.remove_prefix(static_cast<size_t>(written));
        }
    }
    if (fsync(file.fd) != 0) return false;
    return close(std::exchange(file.fd, -1)) == 0;
}

// The rename itself lasts only once the folder is on disk.
bool sync_folder_of(const std::string& path) {
    const std::string folder = std::filesystem::path(path).parent_path();
    const Descriptor file(open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Some file systems cannot sync a folder (EINVAL); there is no better way to ask them.
    return file.fd >= 0 && (fsync(file.fd) == 0 || errno == EINVAL);
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

void file_write(const std::string& path, const std::vector<std::string_view>& parts) {
    const std::string temporary = path + ".tmp";
    if (write_synced(temporary, parts) && rename(temporary.c_str(), path.c_str()) == 0 &&
        sync_folder_of(path)) {
        return;
    }
    const int reason = errno;
    unlink(temporary.c_str());
    fail("cannot write %s: %s", path.c_str(), strerror(reason));
}

// Files: mapped for reading, written piece by piece or replaced in one step.
//
// A file is durable once its bytes, and the entry in its folder, have been synced: file_commit does the
// first, folder_sync the second. Offsets are 64 bits wide throughout. A file over `ulimit -f` is reported as
// "File too large" only where the program ignores SIGXFSZ, which would otherwise end it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// A read-only mapping of a whole file; the last copy to go unmaps it. The file may be renamed, replaced or
// removed meanwhile, but not shortened: reading a page that is gone ends the process (SIGBUS).
struct MappedFile {
    std::shared_ptr<const char> data;  // null for an empty file
    size_t bytes = 0;

    std::string_view text() const { return {data.get(), bytes}; }
};

// Maps a regular file of any size. Fails, naming the flag (may be "") and the path, on anything else.
MappedFile file_map(const std::string& path, const std::string& flag);

bool file_exists(const std::string& path);

// A file that is being written from front to back. Where it ends without file_commit, by an error for
// instance, the incomplete file is removed.
struct FileWriter {
    std::string path;
    int descriptor;

    explicit FileWriter(const std::string& path);  // creates the file, or empties the one that is there
    ~FileWriter();
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
};

// Each fails with path and reason: a full disk, a size limit, a failing device.
void file_append(FileWriter& file, const void* data, size_t bytes);
void file_commit(FileWriter& file);  // syncs and closes

// Syncs a folder: what was created, renamed or removed in it stays so. Fails with path and reason.
void folder_sync(const std::string& path);

// Hands over the whole file, piece by piece. It is read, not mapped: a failing disk gives an error, where a
// mapping would end the process. Fails with path and reason.
void file_read(const std::string& path, const std::function<void(std::string_view)>& take);

// Replaces the file by the concatenated parts: written to path.tmp, synced, renamed, the folder synced. A
// crash leaves the old file or the new one, never half of one. Fails with path and reason (a full disk, ...)
// and then leaves no path.tmp behind.
void file_write(const std::string& path, const std::vector<std::string_view>& parts);

// A folder for a test's files.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "kernels/error.h"

// A folder that is empty at first and gone afterwards.
struct TempFolder {
    std::string path = (std::filesystem::temp_directory_path() / "mugpt_test_XXXXXX").string();

    TempFolder() {
        if (mkdtemp(path.data()) == nullptr) fail("%s: cannot create", path.c_str());
    }
    ~TempFolder() {
        std::error_code ignored;  // a test may have taken the right to write away
        std::filesystem::permissions(path, std::filesystem::perms::owner_all, ignored);
        std::filesystem::remove_all(path, ignored);
    }
    TempFolder(const TempFolder&) = delete;
    TempFolder& operator=(const TempFolder&) = delete;
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

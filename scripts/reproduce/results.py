"""results.json: every number, written anew after each measurement, so that an interrupted run goes on
there."""

import json
import os
from pathlib import Path


class Results:
    def __init__(self, folder, size_name):
        self.path = Path(folder) / "results.json"
        self.data = {"size": size_name, "measurements": {}}
        if self.path.exists():
            self.data = json.loads(self.path.read_text())
            if self.data["size"] != size_name:
                raise SystemExit(
                    f"reproduce_98.sh: --out {folder}: holds size {self.data['size']}, not {size_name}; "
                    "give another folder"
                )

    @classmethod
    def of_file(cls, path):
        if not Path(path).exists():
            raise SystemExit(f"reproduce_98.sh: {path}: is not there")
        results = cls.__new__(cls)
        results.path, results.data = Path(path), json.loads(Path(path).read_text())
        return results

    def done(self, key):
        return key in self.data["measurements"]

    def get(self, key):
        return self.data["measurements"].get(key)

    def put(self, key, value):
        self.data["measurements"][key] = value
        self.write()

    def write(self):
        """Complete or not there at all."""
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump(self.data, file, indent=0, separators=(",", ":"))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

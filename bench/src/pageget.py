"""In the guest: asks the web server of this network for all files below a folder, which is the server's root.

Checks the length of each.
"""
import http.client
import os
import sys
import urllib.parse


def main():
    [root] = sys.argv[1:]
    connection = http.client.HTTPConnection("127.0.0.1", 80)
    count = 0
    for folder, folders, names in os.walk(root):
        # The server runs as another user, and shows no files that only root may read.
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_mode & 0o001]
        for name in names:
            path = os.path.join(folder, name)
            stat = os.lstat(path)
            if os.path.islink(path) or not os.path.isfile(path) or stat.st_mode & 0o004 == 0:
                continue
            connection.request("GET", "/" + urllib.parse.quote(os.path.relpath(path, root)))
            response = connection.getresponse()
            length = len(response.read())
            if response.status != 200 or length != stat.st_size:
                sys.exit(f"{path}: {response.status}, {length} of {stat.st_size} bytes")
            count += 1
    if count == 0:
        sys.exit(f"{root} has no files")
    print(f"{count} files")


if __name__ == "__main__":
    main()

//! The lines of the page of figures: which published figure stands beside which recorded one, and why they differ.

use super::page::{Column, Figure, Part, Row, Shown};

const fn time(bench: &'static str, title: &'static str, row: &'static str) -> Figure {
    Figure { bench, title, row, column: Column::Time }
}

const fn memory(bench: &'static str, title: &'static str, row: &'static str) -> Figure {
    Figure { bench, title, row, column: Column::Memory }
}

const fn size(
    bench: &'static str,
    title: &'static str,
    row: &'static str,
    column: &'static str,
) -> Figure {
    Figure { bench, title, row, column: Column::Named(column) }
}

const fn value(label: &'static str, figure: Figure) -> Part {
    Part(label, Shown::Value(figure))
}

const fn ratio(label: &'static str, ours: Figure, theirs: Figure) -> Part {
    Part(label, Shown::Ratio(ours, theirs))
}

const fn less(label: &'static str, ours: Figure, theirs: Figure) -> Part {
    Part(label, Shown::Less(ours, theirs))
}

/// Bytes of a start of `title` that `row` fetches, beside those of a full pull.
const fn fetched(label: &'static str, title: &'static str) -> Part {
    const BYTES: &str = "Bytes from the registry, with HTTP's own";
    ratio(
        label,
        size("lazy", BYTES, title, "quire pull --lazy"),
        size("lazy", BYTES, title, "quire pull"),
    )
}

const DEVELOPER_COLD: &str = "developer: ls -lR, cold";
const DEVELOPER_WRITABLE: &str = "developer: ls -lR, cold, with a writable layer";
const COMPOSEFS_FORM: &str = "quire objects: composefs + overlayfs";
const STRESS: &str =
    "stress-nolinks: 200,000 random file operations by 20 processes, without hard links";
const COMPILE: &str = "compile: Lua from its sources, make -j2";

const fn page_cache(label: &'static str, pair: &'static str) -> Part {
    const TITLE: &str = "Page cache after reading all of both images";
    less(
        label,
        size("pagecache", TITLE, pair, "packed, shared"),
        size("pagecache", TITLE, pair, "packed, apart"),
    )
}

const fn loaded(label: &'static str, load: &'static str) -> Part {
    const TITLE: &str = "Under load: pages of files";
    less(
        label,
        size("pagecache", TITLE, load, "packed, shared"),
        size("pagecache", TITLE, load, "packed, apart"),
    )
}

pub(super) const PUBLISHED: [Row; 12] = [
    Row {
        work: "Share of an image's bytes that its start needs",
        theirs: "6.4 % ([Slacker, FAST 2016](https://www.usenix.org/conference/fast16/technical-sessions/presentation/harter))",
        ours: &[
            fetched("fetched bytes of a full pull's: PostgreSQL", "postgres --version, no delay"),
            fetched("NumPy", "numpy adds, no delay"),
            fetched("Node.js", "node prints, no delay"),
            fetched("Java", "java --version, no delay"),
            fetched("nginx", "nginx answers, no delay"),
        ],
        why: "Quire's are compressed bytes of the registry, of smaller images, with the index and the hot pack",
    },
    Row {
        work: "`ls -lR` of a large tree, cold, read-only",
        theirs: "EROFS with overlayfs 1.81 s, composefs's own file system 0.71 s: 2.5 times as fast \
                 ([linux-fsdevel, 2023](http://mail.spinics.net/lists/linux-fsdevel/msg233727.html))",
        ours: &[
            value("composefs form", time("metadata", DEVELOPER_COLD, COMPOSEFS_FORM)),
            value("`packed`", time("metadata", DEVELOPER_COLD, "quire packed")),
            ratio(
                "ratio",
                time("metadata", DEVELOPER_COLD, "quire packed"),
                time("metadata", DEVELOPER_COLD, COMPOSEFS_FORM),
            ),
        ],
        why: "that file system was never merged. `packed` is EROFS without overlayfs; overlayfs finds the data of \
              files only when they are opened, which it did not do then",
    },
    Row {
        work: "its memory",
        theirs: "48.4 and 16.4 MB: a third",
        ours: &[ratio(
            "ratio",
            memory("metadata", DEVELOPER_COLD, "quire packed"),
            memory("metadata", DEVELOPER_COLD, COMPOSEFS_FORM),
        )],
        why: "both are what the kernel charges to a control group, of other trees and kernels",
    },
    Row {
        work: "the same below a writable layer",
        theirs: "3.22 and 1.38 s: 2.3 times as fast; 48.3 and 31.0 MB",
        ours: &[
            ratio(
                "ratio of times",
                time("metadata", DEVELOPER_WRITABLE, "quire packed"),
                time("metadata", DEVELOPER_WRITABLE, COMPOSEFS_FORM),
            ),
            ratio(
                "of memory",
                memory("metadata", DEVELOPER_WRITABLE, "quire packed"),
                memory("metadata", DEVELOPER_WRITABLE, COMPOSEFS_FORM),
            ),
        ],
        why: "with a writable layer, both forms are below overlayfs, which makes one more inode for each file",
    },
    Row {
        work: "Page cache after reading all files of two images a minor version apart",
        theirs: "nginx -44 %, redis -33 %, PostgreSQL -28 %, MySQL -21 %, tomcat -49 %, tensorflow -16 % \
                 ([linux-erofs, 2025](https://lists.ozlabs.org/pipermail/linux-erofs/2025-December/014465.html))",
        ours: &[
            page_cache("nginx", "nginx"),
            page_cache("redis", "redis"),
            page_cache("PostgreSQL", "postgresql"),
            page_cache("MariaDB", "mariadb"),
            page_cache("tomcat", "tomcat"),
            less(
                "tensorflow",
                size(
                    "pagecache",
                    "Page cache after reading all of both images, of wheels",
                    "tensorflow",
                    "packed, shared",
                ),
                size(
                    "pagecache",
                    "Page cache after reading all of both images, of wheels",
                    "tensorflow",
                    "packed, apart",
                ),
            ),
        ],
        why: "other images: ours are Debian's packages and their security updates, or one wheel. Java is most \
              of our tomcat, and its two versions differ",
    },
    Row {
        work: "Pages of files of both while they serve",
        theirs: "six pairs, in the same message; the loads are not described",
        ours: &[
            loaded("nginx", "nginx"),
            loaded("redis", "redis"),
            loaded("PostgreSQL", "postgresql"),
            loaded("tomcat", "tomcat"),
        ],
        why: "the page of the bench describes our loads, and lists those that failed",
    },
    Row {
        work: "Random file operations in gVisor, without and with a writable layer inside of it",
        theirs: "fsstress 262.79 s before, 3.18 s with it \
                 ([gVisor, 2023](https://gvisor.dev/blog/2023/05/08/rootfs-overlay/))",
        ours: &[
            value("without", time("gvisor", STRESS, "runsc, ext4, --overlay2=none")),
            value(
                "gVisor's own, in memory",
                time("gvisor", STRESS, "runsc, ext4, --overlay2=root:memory"),
            ),
            value("Quire's, in memory", time("gvisor", STRESS, "quire run, runsc, memory")),
            ratio(
                "ratio of these two",
                time("gvisor", STRESS, "quire run, runsc, memory"),
                time("gvisor", STRESS, "runsc, ext4, --overlay2=root:memory"),
            ),
        ],
        why: "another program and number of operations; since then gVisor opens the host's files directly, so its \
              time without the layer is lower",
    },
    Row {
        work: "A compile in gVisor",
        theirs: "half of the sandbox's overhead is left (the same page, Abseil by Bazel)",
        ours: &[
            value("without gVisor", time("gvisor", COMPILE, "crun, ext4")),
            value("without a layer", time("gvisor", COMPILE, "runsc, ext4, --overlay2=none")),
            value("gVisor's own", time("gvisor", COMPILE, "runsc, ext4, --overlay2=root:self")),
            value("Quire's, in a file", time("gvisor", COMPILE, "quire run, runsc, self")),
        ],
        why: "Lua is a small program: most of the overhead is in starting compilers, which no layer changes",
    },
    Row {
        work: "Reads of files in EROFS beside ext4",
        theirs: "by fscache as by a loop device, and above FUSE; a `tar` of small files faster than ext4 \
                 ([Nydus, 2022](https://www.alibabacloud.com/blog/faster-container-image-loading-speed-with-nydus-rafs-and-erofs_599012), \
                 as bars)",
        ours: &[
            ratio(
                "MB/s divided by ext4's, random, cold, 4 KiB",
                size("read", "random, cold", "quire packed", "psync 4k, 1"),
                size("read", "random, cold", "ext4", "psync 4k, 1"),
            ),
            ratio(
                "warm",
                size("read", "random, warm", "quire packed", "psync 4k, 1"),
                size("read", "random, warm", "ext4", "psync 4k, 1"),
            ),
            ratio(
                "`tar`, ratio of times",
                time("metadata", "debian-large: tar, cold", "quire packed"),
                time("metadata", "debian-large: tar, cold", "folder on ext4"),
            ),
        ],
        why: "Quire reads files of the host by EROFS itself, which Linux could not do then",
    },
    Row {
        work: "A service of lazy images is replaced, or dies",
        theirs: "readers go on (Nydus, the same page; no figure)",
        ours: &[
            value(
                "p99 until readers go on: replaced",
                size("served", "Until readers go on", "20 times replaced", "p99"),
            ),
            value("killed", size("served", "Until readers go on", "100 times killed", "p99")),
        ],
        why: "",
    },
    Row {
        work: "Requests to the registry for a start at 20 ms a request",
        theirs: "no figure: stargz and Nydus read ahead by spans that can be configured",
        ours: &[
            value(
                "PostgreSQL",
                size(
                    "lazy",
                    "Requests to the registry",
                    "postgres --version, 20 ms a request",
                    "quire pull --lazy",
                ),
            ),
            value(
                "Nydus v3",
                size(
                    "lazy",
                    "Requests to the registry",
                    "postgres --version, 20 ms a request",
                    "Nydus v3, fanotify",
                ),
            ),
            value(
                "stargz",
                size(
                    "lazy",
                    "Requests to the registry",
                    "postgres --version, 20 ms a request",
                    "stargz",
                ),
            ),
        ],
        why: "a hot pack has what a recorded start read",
    },
    Row {
        work: "An image is stored, and removed",
        theirs: "saves the time of untar and of garbage collection (EROFS, in words)",
        ours: &[
            ratio(
                "ratio to `tar -x`: `objects`",
                time("storing", "Import", "quire import --form objects"),
                time("storing", "Import", "tar -x, rm -r"),
            ),
            ratio(
                "`tar`",
                time("storing", "Import", "quire import --form tar"),
                time("storing", "Import", "tar -x, rm -r"),
            ),
            ratio(
                "ratio to `rm -r`: `objects`",
                time("storing", "Removal", "quire rmi and gc, objects"),
                time("storing", "Removal", "tar -x, rm -r"),
            ),
            ratio(
                "`tar`",
                time("storing", "Removal", "quire rmi and gc, tar"),
                time("storing", "Removal", "tar -x, rm -r"),
            ),
        ],
        why: "",
    },
];

/// A lazy start on a line of 20 ms a request.
const fn lazy(label: &'static str, title: &'static str, theirs: &'static str) -> Part {
    ratio(label, time("lazy", title, "quire pull --lazy"), time("lazy", title, theirs))
}

const POSTGRES: &str = "postgres --version, 20 ms a request";
const NUMPY: &str = "numpy adds, 20 ms a request";
const NODE: &str = "node prints, 20 ms a request";
const JAVA: &str = "java --version, 20 ms a request";
const NGINX: &str = "nginx answers, 20 ms a request";
const RIGHT_AFTER: &str = "right after another one";
const TRUE_BY_USER: &str = "debian-base: a container that runs true";
const RELATED: &str = "10 related images on the disk";

pub(super) const RIVALS: [Row; 19] = [
    Row {
        work: "A lazy start, 20 ms a request",
        theirs: "Nydus v3, an image optimized for this start",
        ours: &[
            lazy("ratio: PostgreSQL", POSTGRES, "Nydus v3, fanotify, optimized"),
            lazy("NumPy", NUMPY, "Nydus v3, fanotify, optimized"),
            lazy("Node.js", NODE, "Nydus v3, fanotify, optimized"),
            lazy("Java", JAVA, "Nydus v3, fanotify, optimized"),
            lazy("nginx", NGINX, "Nydus v3, fanotify, optimized"),
        ],
        why: "Nydus needs a converted image. Without delay, Quire's files on FUSE cost more requests",
    },
    Row {
        work: "the same",
        theirs: "stargz-snapshotter, optimized",
        ours: &[
            lazy("ratio: PostgreSQL", POSTGRES, "stargz, optimized"),
            lazy("NumPy", NUMPY, "stargz, optimized"),
            lazy("Node.js", NODE, "stargz, optimized"),
            lazy("Java", JAVA, "stargz, optimized"),
            lazy("nginx", NGINX, "stargz, optimized"),
        ],
        why: "stargz serves all reads by FUSE, after the start, too",
    },
    Row {
        work: "Readers that got wrong bytes when all processes of the service were killed",
        theirs: "Nydus v3",
        ours: &[
            value("Quire", size("outages", "quire", "all its processes are killed", "wrong bytes")),
            value(
                "Nydus",
                size(
                    "outages",
                    "Nydus v3, fanotify",
                    "all its processes are killed",
                    "wrong bytes",
                ),
            ),
        ],
        why: "Nydus fills a sparse file: without its service, the kernel reads holes as zeros",
    },
    Row {
        work: "nginx answers in containerd, from an empty store",
        theirs: "overlayfs of containerd",
        ours: &[ratio(
            "ratio",
            time("engine", "nginx, cold: nginx answers", "Quire"),
            time("engine", "nginx, cold: nginx answers", "overlayfs"),
        )],
        why: "",
    },
    Row {
        work: "the same",
        theirs: "EROFS snapshotter of containerd",
        ours: &[ratio(
            "ratio",
            time("engine", "nginx, cold: nginx answers", "Quire"),
            time("engine", "nginx, cold: nginx answers", "erofs"),
        )],
        why: "that snapshotter writes each layer once and hashes no file; Quire stores each file by its digest, which \
              shares files between images (see the next line)",
    },
    Row {
        work: "Ten related images on the disk of containerd, without the downloaded layers",
        theirs: "its EROFS snapshotter, its overlayfs",
        ours: &[
            ratio(
                "ratio",
                size("engine", RELATED, "Quire", "all but those"),
                size("engine", RELATED, "erofs", "all but those"),
            ),
            ratio(
                "",
                size("engine", RELATED, "Quire", "all but those"),
                size("engine", RELATED, "overlayfs", "all but those"),
            ),
        ],
        why: "",
    },
    Row {
        work: "nginx answers in containerd, lazily or in parallel",
        theirs: "stargz-snapshotter, soci-snapshotter",
        ours: &[
            ratio(
                "ratio of Quire's full pull",
                time("engine", "nginx, cold: nginx answers", "Quire"),
                time("engine", "nginx, cold: nginx answers", "stargz-snapshotter"),
            ),
            ratio(
                "",
                time("engine", "nginx, cold: nginx answers", "Quire"),
                time("engine", "nginx, cold: nginx answers", "soci-snapshotter"),
            ),
        ],
        why: "stargz fetches only the parts that programs read, from a converted image. The bench `lazy` compares lazy starts",
    },
    Row {
        work: "A pull of 237 MB from a near registry",
        theirs: "podman; skopeo with umoci",
        ours: &[
            ratio(
                "ratio",
                time("pull", "debian-postgres", "quire pull"),
                time("pull", "debian-postgres", "podman pull"),
            ),
            ratio(
                "",
                time("pull", "debian-postgres", "quire pull"),
                time("pull", "debian-postgres", "skopeo copy"),
            ),
        ],
        why: "Debian 12's podman 4.3",
    },
    Row {
        work: "An import of the same image",
        theirs: "composefs-rs; umoci; podman",
        ours: &[
            ratio(
                "ratio",
                time("import", "debian-postgres", "quire import"),
                time("import", "debian-postgres", "cfsctl oci pull"),
            ),
            ratio(
                "",
                time("import", "debian-postgres", "quire import"),
                time("import", "debian-postgres", "umoci unpack"),
            ),
            ratio(
                "",
                time("import", "debian-postgres", "quire import"),
                time("import", "debian-postgres", "podman pull"),
            ),
        ],
        why: "",
    },
    Row {
        work: "A push of one new layer",
        theirs: "podman",
        ours: &[ratio(
            "ratio",
            time("push", "a new layer each time, on a base that the registry has", "quire push"),
            time("push", "a new layer each time, on a base that the registry has", "podman push"),
        )],
        why: "",
    },
    Row {
        work: "Twenty versions of an application on the disk",
        theirs: "podman",
        ours: &[ratio(
            "ratio",
            size("versions", "The disk after 20 versions", "layered", "quire"),
            size("versions", "The disk after 20 versions", "layered", "podman"),
        )],
        why: "",
    },
    Row {
        work: "`true` in a container, by root, right after another",
        theirs: "podman; only crun",
        ours: &[
            ratio(
                "ratio",
                time("run", RIGHT_AFTER, "quire run, dir, runc"),
                time("run", RIGHT_AFTER, "podman run, runc"),
            ),
            ratio(
                "",
                time("run", RIGHT_AFTER, "quire run, dir, crun"),
                time("run", RIGHT_AFTER, "crun alone, a plain folder"),
            ),
        ],
        why: "a plain folder needs no mount, no writable layer and no monitor",
    },
    Row {
        work: "the same, by a user",
        theirs: "podman with crun",
        ours: &[
            ratio(
                "ratio: by the mount service",
                time("rootless", TRUE_BY_USER, "quire run --via service"),
                time("rootless", TRUE_BY_USER, "podman run --rootfs DIR:O, crun"),
            ),
            ratio(
                "by FUSE",
                time("rootless", TRUE_BY_USER, "quire run --via fuse"),
                time("rootless", TRUE_BY_USER, "podman run --rootfs DIR:O, crun"),
            ),
        ],
        why: "",
    },
    Row {
        work: "`ls -lR` of 64,246 files in an image that a user has mounted by FUSE, warm",
        theirs: "composefs-rs",
        ours: &[ratio(
            "ratio",
            time(
                "rootless",
                "developer: ls -lR, warm",
                "quire mount --via fuse, in a user namespace",
            ),
            time("rootless", "developer: ls -lR, warm", "composefs-rs, FUSE"),
        )],
        why: "the kernel keeps names and attributes that Quire's server has sent",
    },
    Row {
        work: "A composefs image of 64,246 files",
        theirs: "composefs (C)",
        ours: &[
            ratio(
                "ratio",
                time("mkcomposefs", "cs9-developer: as it is", "Quire"),
                time("mkcomposefs", "cs9-developer: as it is", "composefs (C)"),
            ),
            ratio(
                "of memory",
                memory("mkcomposefs", "cs9-developer: as it is", "Quire"),
                memory("mkcomposefs", "cs9-developer: as it is", "composefs (C)"),
            ),
        ],
        why: "the images are the same, bit for bit",
    },
    Row {
        work: "A mount and its removal, as two processes",
        theirs: "composefs (C)",
        ours: &[ratio(
            "ratio",
            time("mount", "debian-small", "Quire's mount.composefs, umount(8)"),
            time("mount", "debian-small", "composefs (C) mount.composefs, umount(8)"),
        )],
        why: "",
    },
    Row {
        work: "An EROFS image of a tree",
        theirs: "mkfs.erofs, uncompressed",
        ours: &[
            ratio(
                "ratio of sizes",
                size(
                    "metadata",
                    "debian-large: sizes (ext4 and XFS: blocks of their files; objects: in blocks)",
                    "quire packed",
                    "image and data",
                ),
                size(
                    "metadata",
                    "debian-large: sizes (ext4 and XFS: blocks of their files; objects: in blocks)",
                    "mkfs.erofs",
                    "image and data",
                ),
            ),
            ratio(
                "of a cold `ls -lR` of another tree",
                time("metadata", DEVELOPER_COLD, "quire packed"),
                time("metadata", DEVELOPER_COLD, "mkfs.erofs"),
            ),
        ],
        why: "Quire has metadata and data in separate files, each content once, in blocks of 512 bytes",
    },
    Row {
        work: "Work in a container's writable layer: 200,000 file operations; a compile",
        theirs: "podman",
        ours: &[
            ratio(
                "ratio",
                time(
                    "writable",
                    "stress: 200,000 random file operations by 20 processes",
                    "quire run, dir",
                ),
                time(
                    "writable",
                    "stress: 200,000 random file operations by 20 processes",
                    "podman run, runc",
                ),
            ),
            ratio(
                "",
                time("writable", COMPILE, "quire run, dir"),
                time("writable", COMPILE, "podman run, runc"),
            ),
        ],
        why: "the times include the start and the end of the container",
    },
    Row {
        work: "A copy of a container with 64 MiB of changes",
        theirs: "`podman commit`, and a run of the new image",
        ours: &[
            ratio(
                "`snapshot create`, ratio",
                size("forks", "Quire", "ext4, 64 MiB in 2,000 files", "snapshot create"),
                size("forks", PODMAN_COMMIT, "podman", "commit"),
            ),
            value("pause", size("forks", "Quire", "ext4, 64 MiB in 2,000 files", "pause")),
            value("podman's", size("forks", PODMAN_COMMIT, "podman", "commit")),
        ],
        why: "podman writes the changes into a layer while the container is paused",
    },
];

const PODMAN_COMMIT: &str =
    "podman: commit of the container with 64 MiB, which pauses it, and a run of the new image";

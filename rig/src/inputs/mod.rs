//! Makes realistic inputs from packages of the Debian mirror that this machine's apt is configured for.

pub(crate) mod apt;
pub mod jobs;
pub mod layer;
pub mod layout;
mod makers;
pub mod pairs;
pub mod programs;
mod rootfs;
pub mod sid;
pub mod versions;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use flate2::read::MultiGzDecoder;

use crate::cache::Cache;
use crate::{Skipped, tools, vm};

pub(crate) use rootfs::arm64 as arm64_root;

#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Inputs to make; default: those that tests need
    names: Vec<Input>,
    /// Make inputs again even if the cache has them
    #[arg(long)]
    refresh: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Input {
    /// An OCI layout of a small Debian image: two gzip layers, whiteouts, a full config
    DebianSmall,
    /// An OCI layout of Debian with PostgreSQL: two gzip layers, the first one that of `debian-small`
    DebianPostgres,
    /// An OCI layout of Debian with compilers, runtimes and headers: 2.5 GB, for the benches of metadata and of reads
    DebianLarge,
    /// A Debian sid root with the C composefs tools, erofs-utils and systemd-container, and wrapper scripts to run
    /// them from outside
    Sid,
    /// Images with the same content by many makers: builders, and programs that write tars
    Makers,
    /// Twenty versions of an application, for the bench of versions: 2 GB
    Versions,
    /// An OCI layout of Debian with a compiler, git and jobs, for the bench of writable layers
    DebianJobs,
    /// Images with NumPy, Node.js, a JVM and nginx, for the bench of lazy starts
    DebianPrograms,
    /// Pairs of images one minor version apart, for the bench of the page cache: 4 GB
    Pairs,
    /// Debian sid as above with podman 5
    SidPodman,
    /// Debian sid with systemd as its first program, for the test of units and login sessions in a virtual machine
    SidBooted,
    /// Debian sid with a Rust compiler, and the libraries of Rust and C for aarch64: for the tests on another machine
    SidRust,
    /// QEMU of Debian sid, which runs programs for aarch64: for the same
    QemuUser,
    /// systemd's `ukify` of Debian sid, for tests of bootable disks: needs python3-pefile
    Ukify,
    /// A Debian root for arm64, and its programs for tests in a virtual machine
    Arm64Root,
    /// `crane`, for tests of eStargz layers: needs Go
    Crane,
    /// gVisor's `runsc`, for tests of `gvisor:` and `run --runtime runsc`: needs Go
    Runsc,
    /// containerd's own tests of snapshotters, for `serve --snapshotter`: needs Go
    Suite,
    /// The newest containerd, for tests of `serve --snapshotter`: needs Go
    Containerd,
    /// The newest containerd 1.7, for the same
    #[value(name = "containerd-1.7")]
    Containerd17,
    /// The newest containerd 2.1, for the same
    #[value(name = "containerd-2.1")]
    Containerd21,
    /// Docker 28 with buildx, for the same: takes some minutes, so only if named
    Docker,
    /// crictl, a client of the Kubernetes Container Runtime Interface, for the same: needs Go
    Crictl,
    /// kubelet 1.34, the node agent of Kubernetes, for the same: needs Go, takes some minutes
    Kubelet,
    /// Kubernetes' types and Helm's engine, for tests of the manifests: needs Go
    Manifests,
    /// pjdfstest, a test suite for file systems, for tests of users' containers
    Pjdfstest,
    /// cargo-deb, which makes the Debian package
    CargoDeb,
    /// cargo-deny, which checks licenses and sources of dependencies
    CargoDeny,
    /// mdbook, which builds the book
    Mdbook,
    /// Debian's kernel of the long-term series, for a second guest
    LinuxLts,
    /// composefs-rs's `cfsctl`, for the bench of imports: takes a quarter of an hour
    Cfsctl,
    /// Nydus v3, for the bench of lazy starts: takes a few minutes
    Nydus,
    /// A program that mounts eStargz layers, for the benches of lazy starts and of engines: needs Go
    Stargz,
    /// soci-snapshotter, for the bench of engines: needs Go and zlib
    Soci,
}

pub fn run(args: &Args) -> Result<()> {
    let cache = Cache::open()?;
    let all = [
        Input::DebianSmall,
        Input::Sid,
        Input::SidBooted,
        Input::Ukify,
        Input::Crane,
        Input::Makers,
        Input::Runsc,
        Input::Suite,
        Input::Containerd,
        Input::Containerd17,
        Input::Containerd21,
        Input::Crictl,
        Input::Kubelet,
        Input::Manifests,
        Input::Pjdfstest,
        Input::CargoDeb,
        Input::CargoDeny,
        Input::Mdbook,
        Input::LinuxLts,
    ];
    // An input that this machine cannot make does not prevent the others.
    let mut reasons = Vec::new();
    for input in if args.names.is_empty() { &all[..] } else { &args.names } {
        match make(&cache, *input, args.refresh) {
            Ok(paths) => paths.iter().for_each(|it| println!("{it}")),
            Err(error) => match error.downcast::<Skipped>() {
                Ok(Skipped(reason)) => reasons.push(reason),
                Err(error) => return Err(error),
            },
        }
    }
    reasons.dedup();
    if reasons.is_empty() { Ok(()) } else { bail!(Skipped(reasons.join("; "))) }
}

/// Whether an input has this name.
pub fn is_input(name: &str) -> bool {
    Input::from_str(name, false).is_ok()
}

/// Returns the names of all inputs in the cache.
pub fn made(cache: &Cache) -> BTreeSet<String> {
    let all = Input::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    all.map(|it| it.get_name().to_owned()).filter(|it| is_made(cache, it)).collect()
}

/// Whether the cache has the input with this name, in the version that this program makes.
pub fn is_made(cache: &Cache, name: &str) -> bool {
    let Ok(input) = Input::from_str(name, false) else { return false };
    let start = match input {
        Input::CargoDeb => return tools::has_cargo_deb(cache),
        Input::CargoDeny => return tools::has_cargo_deny(cache),
        Input::Mdbook => return tools::has_mdbook(cache),
        Input::Suite => "snapshotter-suite-".to_owned(),
        Input::Manifests => "kubernetes-manifests-".to_owned(),
        Input::Containerd => tools::CONTAINERD.entry(),
        Input::Containerd17 => tools::CONTAINERD_1_7.entry(),
        Input::Containerd21 => tools::CONTAINERD_2_1.entry(),
        Input::Docker | Input::Crictl | Input::Kubelet | Input::Pjdfstest => format!("{name}-"),
        // The whole name is compared, because other entries have the same prefix.
        _ => return cache.dir().join(name).exists(),
    };
    let entries = cache.dir().read_dir().into_iter().flatten().flatten();
    let mut names = entries.map(|it| it.file_name());
    names.any(|it| it.as_encoded_bytes().starts_with(start.as_bytes()))
}

/// Makes an input unless the cache has it. Returns its paths, as shown to the user.
fn make(cache: &Cache, input: Input, refresh: bool) -> Result<Vec<String>> {
    let path = match input {
        Input::DebianSmall => debian_small(cache, refresh)?,
        Input::DebianPostgres => debian_postgres(cache, refresh)?,
        Input::DebianLarge => debian_large(cache, refresh)?,
        Input::Sid => sid::make(cache, refresh)?.dir().to_owned(),
        Input::Makers => makers::make(cache, refresh)?,
        Input::Versions => versions::make(cache, refresh)?.dir().to_owned(),
        Input::DebianJobs => jobs::make(cache, refresh)?,
        Input::DebianPrograms => {
            let made = programs::PROGRAMS
                .map(|(name, packages)| programs::make(cache, name, packages, refresh));
            return made.into_iter().map(|it| Ok(it?.display().to_string())).collect();
        }
        Input::Pairs => {
            let mut made = Vec::new();
            for (name, packages) in pairs::PAIRS {
                let pair = pairs::make(cache, name, packages, refresh)?;
                made.extend(pair.iter().map(|it| format!("{name} {}", it.version)));
            }
            return Ok(made);
        }
        Input::Crane => tools::crane(cache)?,
        Input::Runsc => tools::runsc(cache)?,
        Input::Suite => tools::suite(cache)?,
        Input::Containerd => tools::containerd(cache, tools::CONTAINERD)?,
        Input::Containerd17 => tools::containerd(cache, tools::CONTAINERD_1_7)?,
        Input::Containerd21 => tools::containerd(cache, tools::CONTAINERD_2_1)?,
        Input::Docker => tools::docker(cache)?,
        Input::Crictl => tools::crictl(cache)?,
        Input::Kubelet => tools::kubelet(cache)?,
        Input::Manifests => tools::manifests(cache)?,
        Input::Pjdfstest => tools::pjdfstest(cache)?,
        Input::CargoDeb => tools::cargo_deb(cache)?,
        Input::CargoDeny => tools::cargo_deny(cache)?,
        Input::Mdbook => tools::mdbook(cache)?,
        Input::LinuxLts => vm::kernel(cache, "lts")?,
        Input::Cfsctl => tools::cfsctl(cache)?,
        Input::Nydus => tools::nydus(cache)?,
        Input::Stargz => tools::stargz(cache)?,
        Input::Soci => tools::soci(cache)?,
        Input::SidPodman => sid::make_podman(cache, refresh)?,
        Input::SidBooted => sid::make_booted(cache, refresh)?,
        Input::SidRust => sid::make_rust(cache, refresh)?,
        Input::Arm64Root => arm64_root(cache, refresh)?,
        Input::QemuUser => sid::emulator(cache, refresh)?,
        Input::Ukify => sid::ukify(cache, refresh)?,
    };
    Ok(vec![path.display().to_string()])
}

/// Returns the root of Debian's minimal system as a directory that must not be changed.
pub fn debian_root(cache: &Cache) -> Result<PathBuf> {
    Ok(rootfs::base(cache, false)?.root())
}

/// Makes an OCI layout with the tag `latest`: Debian's minimal system, and a layer that adds, changes and deletes
/// files.
pub fn debian_small(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    // Deletes files and a directory, replaces a directory by an opaque one and a file by a directory, and adds one
    // inode of each kind.
    const CHANGE: &str = "
        rm -r /usr/share/doc/bash /usr/share/doc/apt /etc/motd
        rm -r /usr/share/info && mkdir /usr/share/info && echo new > /usr/share/info/index
        rm /etc/issue && mkdir /etc/issue && echo folder > /etc/issue/net
        mkdir -p /srv/kinds && cd /srv/kinds
        echo hello > file && ln file hardlink && ln -s file symlink && mkfifo fifo
        : > empty && truncate -s 1M sparse && mknod device c 1 3
        echo setuid > setuid && chown 1000:1000 setuid && chmod 4755 setuid
        mkdir sticky && chmod 1777 sticky";
    let change = rootfs::Change {
        packages: &[],
        script: CHANGE,
        xattrs: &[
            ("srv/kinds/file", "user.sample", b"a value"),
            ("srv/kinds/setuid", "security.capability", CAN_PING),
            ("srv/kinds", "trusted.sample", b""),
        ],
    };
    // A version 2 capability: cap_net_raw, effective and permitted (linux/capability.h, struct vfs_cap_data).
    const CAN_PING: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let base = rootfs::base(cache, refresh)?;
    cache.entry("debian-small", refresh, |draft| {
        let top = rootfs::change(&base, &change, draft, layer::Mtime::Exact)?;
        let mut config = layout::Config::default();
        config.env("QUIRE_SAMPLE", "a value with spaces");
        config.entrypoint(&["/usr/bin/env"]).command(&["cat", "/etc/os-release"]);
        config.user("daemon").folder("/srv").label("org.example.sample", "debian-small");
        layout::write(draft, &config, &[base.layer()?, top])
    })
}

/// Makes an OCI layout with the tag `latest`: Debian's minimal system, and a layer with PostgreSQL and its
/// dependencies.
pub fn debian_postgres(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    // All locales increase the image to the size of a usual server image: 14,900 files, 700 MB.
    let packages = &["postgresql", "postgresql-contrib", "locales-all"];
    let change = rootfs::Change { packages, script: "", xattrs: &[] };
    let base = rootfs::base(cache, false)?;
    cache.entry("debian-postgres", refresh, |draft| {
        let top = rootfs::change(&base, &change, draft, layer::Mtime::WholeSeconds)?;
        let mut config = layout::Config::default();
        config.command(&["bash"]).label("org.example.sample", "debian-postgres");
        layout::write(draft, &config, &[base.layer()?, top])
    })
}

/// Makes an OCI layout with the tag `latest`: Debian's minimal system, and a layer like a developer's image, with
/// many thousands of headers and scripts, and libraries and archives of a hundred megabytes.
pub fn debian_large(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    // Debian names the headers after the architecture.
    let headers =
        if cfg!(target_arch = "aarch64") { "linux-headers-arm64" } else { "linux-headers-amd64" };
    let packages = &[
        "build-essential",
        "clang",
        "default-jdk-headless",
        "git",
        "golang-go",
        "libboost-dev",
        headers,
        "locales-all",
        "nodejs",
        "npm",
        "perl-doc",
        "python3-django",
        "python3-scipy",
    ];
    let change = rootfs::Change { packages, script: "", xattrs: &[] };
    let base = rootfs::base(cache, false)?;
    cache.entry("debian-large", refresh, |draft| {
        let top = rootfs::change(&base, &change, draft, layer::Mtime::WholeSeconds)?;
        let mut config = layout::Config::default();
        config.command(&["bash"]).label("org.example.sample", "debian-large");
        layout::write(draft, &config, &[base.layer()?, top])
    })
}

/// Makes an OCI layout with the tag `latest`: Debian's minimal system, which is the lowest layer of the other images.
pub fn debian_base(cache: &Cache) -> Result<PathBuf> {
    let base = rootfs::base(cache, false)?;
    cache.entry("debian-base-image", false, |draft| {
        layout::write(draft, layout::Config::default().command(&["bash"]), &[base.layer()?])
    })
}

/// Returns Debian's minimal system as a directory.
pub fn base_root(cache: &Cache) -> Result<PathBuf> {
    rootfs::base(cache, false).map(|base| base.root())
}

/// Returns the layer of Debian's minimal system, for images that are made of it.
pub fn base_layer(cache: &Cache) -> Result<layer::LayerFile> {
    rootfs::base(cache, false)?.layer()
}

/// Decompresses `NAME.dump.gz`, from the directory in `QUIRE_TEST_DATA`, to `NAME.dump` in the cache.
pub fn dump(cache: &Cache, name: &str) -> Result<PathBuf> {
    let folder = std::env::var_os("QUIRE_TEST_DATA")
        .ok_or_else(|| Skipped(String::from("QUIRE_TEST_DATA is not set")))?;
    let packed = PathBuf::from(folder).join(format!("{name}.dump.gz"));
    cache.entry(&format!("{name}.dump"), false, |draft| {
        let open = || format!("cannot open {}", packed.display());
        let mut packed = MultiGzDecoder::new(std::fs::File::open(&packed).with_context(open)?);
        io::copy(&mut packed, &mut std::fs::File::create(draft)?)?;
        Ok(())
    })
}

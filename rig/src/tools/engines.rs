//! Builds container engines from the Go module proxy, in the versions that tests and benches use.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::{go_program, install, quiet, sources};
use crate::Skipped;
use crate::cache::Cache;

/// Excludes containerd's drivers for btrfs, device mapper and ZFS, which need C.
const TAGS: &str = "no_btrfs,no_devmapper,no_zfs";

/// A version of containerd in the proxy.
#[derive(Debug, Clone, Copy)]
pub struct Containerd {
    pub version: &'static str,
    module: &'static str,
}

impl Containerd {
    /// Returns its name in the cache.
    pub(crate) fn entry(self) -> String {
        format!("containerd-{}", self.version)
    }
}

/// The newest containerd.
pub const CONTAINERD: Containerd =
    Containerd { version: "2.4.2", module: "github.com/containerd/containerd/v2" };
/// The newest release of the last line before the second major version.
pub const CONTAINERD_1_7: Containerd =
    Containerd { version: "1.7.35", module: "github.com/containerd/containerd" };
/// The newest release of the first line whose images are pulled by its transfer service.
pub const CONTAINERD_2_1: Containerd =
    Containerd { version: "2.1.9", module: "github.com/containerd/containerd/v2" };

/// Returns `containerd`, `ctr` and the shim, in `containerd-VERSION/bin`.
pub fn containerd(cache: &Cache, wanted: Containerd) -> Result<PathBuf> {
    let name = wanted.entry();
    let module = format!("{}@v{}", wanted.module, wanted.version);
    let programs = ["./cmd/containerd", "./cmd/ctr", "./cmd/containerd-shim-runc-v2"];
    go_program(cache, &name, &name, |go, bin, build| {
        module_build(go, bin, build, &module, &programs)
    })
}

/// The last Docker of the line 28, and the newest buildx that it was released with.
const DOCKER: &str = "28.5.2";
const BUILDX: &str = "0.29.1";

/// Returns `dockerd`, `docker` and its plugin `docker-buildx`, in `docker-VERSION/bin`.
pub fn docker(cache: &Cache) -> Result<PathBuf> {
    let name = format!("docker-{DOCKER}");
    let modules = [
        (format!("github.com/docker/docker@v{DOCKER}+incompatible"), "./cmd/dockerd"),
        (format!("github.com/docker/cli@v{DOCKER}+incompatible"), "./cmd/docker"),
        (format!("github.com/docker/buildx@v{BUILDX}"), "./cmd/buildx"),
    ];
    go_program(cache, &name, &name, |go, bin, build| {
        let mut last = Command::new("true");
        for (module, program) in &modules {
            quiet(&mut last)?;
            last = module_build(go, bin, build, module, &[program])?;
        }
        Ok(last)
    })
}

/// A client of the Kubernetes Container Runtime Interface.
const CRI_TOOLS: &str = "1.37.0";

/// Returns `crictl`, built into the cache as `crictl-VERSION/bin/crictl`.
pub fn crictl(cache: &Cache) -> Result<PathBuf> {
    let (name, module) =
        (format!("crictl-{CRI_TOOLS}"), format!("sigs.k8s.io/cri-tools@v{CRI_TOOLS}"));
    let dir = go_program(cache, &name, &name, |go, bin, build| {
        module_build(go, bin, build, &module, &["./cmd/crictl"])
    })?;
    Ok(dir.join("bin/crictl"))
}

/// The node agent of Kubernetes: the minor and the patch release. Kubernetes' own module has these after a 1, and the
/// modules of its parts have them after a 0.
const KUBELET: &str = "34.12";

/// Returns `kubelet`, built into the cache as `kubelet-VERSION/bin/kubelet`.
pub fn kubelet(cache: &Cache) -> Result<PathBuf> {
    let name = format!("kubelet-1.{KUBELET}");
    let dir = go_program(cache, &name, &name, |go, bin, build| {
        // The repository is a workspace, whose other modules are not in this one.
        let go = || {
            let mut go = go();
            go.env("GOWORK", "off");
            go
        };
        let sources = module_sources(&go, build, &format!("k8s.io/kubernetes@v1.{KUBELET}"))?;
        use_published_parts(&go, &sources, &format!("v0.{KUBELET}"))?;
        Ok(sources_build(&go, bin, &sources, &["./cmd/kubelet"]))
    })?;
    Ok(dir.join("bin/kubelet"))
}

/// Replaces directories in a module's `replace` directives by the published modules. Go omits such directories from a
/// download, because each is a separate module. Source: go.dev/ref/mod, "Module zip files".
fn use_published_parts(go: &dyn Fn() -> Command, sources: &Path, version: &str) -> Result<()> {
    let edit = || {
        let mut edit = go();
        edit.current_dir(sources).args(["mod", "edit"]);
        edit
    };
    let said: serde_json::Value = serde_json::from_str(&quiet(edit().arg("-json"))?)?;
    let replaced = said["Replace"].as_array().into_iter().flatten();
    // All other replacements have a version.
    let folders = replaced.filter(|it| it["New"]["Version"].is_null());
    let names = folders.filter_map(|it| it["Old"]["Path"].as_str());
    let words = names.map(|name| format!("-replace={name}={name}@{version}"));
    quiet(edit().args(words)).map(drop)
}

/// Returns soci-snapshotter: a program of this repository with its library, because the module of soci-snapshotter's
/// own programs has no release.
pub fn soci(cache: &Cache) -> Result<PathBuf> {
    const FILES: [(&str, &str); 3] = [
        ("go.mod", include_str!("soci/go.mod")),
        ("go.sum", include_str!("soci/go.sum")),
        ("main.go", include_str!("soci/main.go")),
    ];
    // The program reads gzip with zlib.
    install(&[("gcc", "gcc")])?;
    if !Path::new("/usr/include/zlib.h").exists() {
        let reason = "not installed; please install this Debian package: zlib1g-dev";
        bail!(Skipped(reason.into()));
    }
    let dir = sources(cache, "soci", "soci-snapshotter 0.16.1", &FILES, |go, bin| {
        go.env("CGO_ENABLED", "1").args(["build", "-o"]).arg(bin.join("soci")).arg(".");
    })?;
    Ok(dir.join("bin/soci"))
}

/// Builds programs of a module as its maintainers do: with the module's own requirements, replacements and
/// exclusions, which `go install` refuses.
fn module_build(
    go: &dyn Fn() -> Command,
    bin: &Path,
    build: &Path,
    module: &str,
    programs: &[&str],
) -> Result<Command> {
    let sources = module_sources(go, build, module)?;
    Ok(sources_build(go, bin, &sources, programs))
}

/// Downloads a module. Returns a copy of its files, which can be changed.
fn module_sources(go: &dyn Fn() -> Command, build: &Path, module: &str) -> Result<PathBuf> {
    let said = quiet(go().args(["mod", "download", "-json", module]))?;
    let said: serde_json::Value = serde_json::from_str(&said)?;
    let downloaded = said["Dir"].as_str().context("Go does not say where it put a module")?;
    let sources = build.join("sources").join(module.replace(['/', '@'], "-"));
    fs::create_dir_all(&sources)?;
    quiet(
        Command::new("cp")
            .args(["-r", "--no-preserve=mode"])
            .arg(format!("{downloaded}/."))
            .arg(&sources),
    )?;
    // Docker's repositories are not modules yet, but have their requirements in files with these names.
    for (vendored, name) in [("vendor.mod", "go.mod"), ("vendor.sum", "go.sum")] {
        if sources.join(vendored).exists() {
            fs::rename(sources.join(vendored), sources.join(name))?;
        }
    }
    Ok(sources)
}

fn sources_build(
    go: &dyn Fn() -> Command,
    bin: &Path,
    sources: &Path,
    programs: &[&str],
) -> Command {
    let mut go = go();
    go.current_dir(sources).args(["build", "-mod=mod", "-tags", TAGS, "-o"]);
    // The slash at the end denotes a directory.
    go.arg(bin.join("")).args(programs);
    go
}

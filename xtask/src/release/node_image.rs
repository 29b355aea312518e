//! `cargo xtask node-image`: makes an OCI image with Quire and nothing else, for pods on nodes of Kubernetes. Quire
//! itself imports and exports it.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use image::digest::Digest;
use rig::Failed;
use rig::process::{cargo, need, quiet, repository, shown, target_dir};
use serde_json::{Value, json};

use super::compile::has_interpreter;

/// Name of the image, without its version. `dist/kubernetes` has it as well.
const NAME: &str = "localhost/quire";

/// Media types. Source: OCI image-spec 1.1, "Media Types".
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Static binary for the image, such as that of a release; by default one is built
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Archive to write, in the format of `docker save`, which `ctr image import` reads
    #[arg(long, value_name = "FILE", default_value = "target/quire-image.tar")]
    output: PathBuf,
}

/// The contents of an image, and how to make it.
pub(super) struct NodeImage<'a> {
    /// Static binary for the image.
    pub(super) binary: &'a Path,
    /// A binary that this machine can run.
    pub(super) runs: &'a Path,
    /// Licenses and copyright notices of all crates; `None` for an image that is not distributed.
    pub(super) notices: Option<&'a Path>,
    /// Processor of the binary, as in a target of Rust.
    pub(super) machine: &'a str,
    /// Commit of the sources.
    pub(super) hash: &'a str,
    /// Time of all files, in seconds since 1970.
    pub(super) seconds: &'a str,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = args.binary.clone().map_or_else(build, Ok)?;
    let mut git = Command::new("git");
    let commit = quiet(git.args(["log", "-1", "--format=%H %ct"]).current_dir(repository()))?;
    let (hash, seconds) = commit.trim_end().split_once(' ').context("git printed no time")?;
    let image = NodeImage {
        binary: &binary,
        runs: &binary,
        notices: None,
        machine: env::consts::ARCH,
        hash: hash.get(..12).unwrap_or(hash),
        seconds,
    };
    image.make(&args.output)?;
    println!("{}:{} is in {}", NAME, env!("CARGO_PKG_VERSION"), args.output.display());
    println!("on each node: ctr -n k8s.io image import {}", args.output.display());
    Ok(())
}

/// Builds a static binary for this machine, optimized like that of `make install`.
fn build() -> Result<PathBuf> {
    let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let folder = target_dir()?.join("node-image");
    let mut cargo = cargo();
    // Without `--target`, the flag would also apply to build scripts and procedural macros, which cannot be static.
    cargo.args(["build", "--package=quire-cli", "--release", "--target", &target]);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    shown(cargo.arg("--target-dir").arg(&folder))?;
    Ok(folder.join(target).join("release/quire"))
}

impl NodeImage<'_> {
    /// Writes the image as a docker archive. The same contents always give the same bytes.
    pub(super) fn make(&self, output: &Path) -> Result<()> {
        if has_interpreter(&fs::read(self.binary)?) {
            let binary = self.binary.display();
            bail!(Failed(format!("{binary} is not static, so it does not run in an empty image")));
        }
        let work = tempfile::tempdir_in(target_dir()?)?;
        let layout = work.path().join("layout");
        let tar = self.layer(work.path())?;
        self.layout(&layout, &fs::read(tar)?)?;
        let name = format!("{NAME}:{}", env!("CARGO_PKG_VERSION"));
        let quire = |words: &[&str]| {
            let mut quire = Command::new(self.runs);
            quire.arg("--store").arg(work.path().join("store")).arg("--quiet").args(words);
            // Policies of this machine are for its own containers.
            quire.env_remove("QUIRE_POLICY").env_remove("QUIRE_SEAL").env_remove("QUIRE_LOG");
            quiet(&mut quire).map(drop)
        };
        let source = format!("oci:{}", layout.display());
        quire(&["import", "--platform", &self.platform(), &source, &name])?;
        let output = std::path::absolute(output)?;
        fs::create_dir_all(output.parent().context("the output has a directory")?)?;
        let target = format!("docker-archive:{}:{name}", output.display());
        quire(&["export", "--force", &name, &target])
    }

    /// Returns the processor in the words of OCI. Source: Go's `internal/goarch`.
    fn architecture(&self) -> &str {
        match self.machine {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        }
    }

    fn platform(&self) -> String {
        format!("linux/{}", self.architecture())
    }

    /// Makes the tar of all files.
    fn layer(&self, work: &Path) -> Result<PathBuf> {
        let root = work.join("root");
        let documents = root.join("usr/share/doc/quire");
        // The directories are mount points of the pod, or for temporary files.
        for folder in ["usr/bin", "etc/quire", "var/lib/quire", "run", "tmp", "dev", "proc", "sys"]
        {
            fs::create_dir_all(root.join(folder))?;
        }
        fs::create_dir_all(&documents)?;
        fs::copy(self.binary, root.join("usr/bin/quire"))?;
        for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
            fs::copy(repository().join(license), documents.join(license))?;
        }
        if let Some(notices) = self.notices {
            fs::copy(notices, documents.join("THIRD-PARTY-NOTICES.txt"))?;
        }
        // The umask of this process does not matter: modes are set here, and the owner by tar.
        set_modes(&root)?;
        fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777))?;
        fs::set_permissions(root.join("usr/bin/quire"), fs::Permissions::from_mode(0o755))?;
        let tar = work.join("layer.tar");
        let mut command = Command::new(need("tar")?);
        command.args(["--create", "--format=gnu", "--sort=name", "--numeric-owner"]);
        command.args(["--owner=0", "--group=0"]).arg(format!("--mtime=@{}", self.seconds));
        quiet(command.arg("--file").arg(&tar).arg("--directory").arg(&root).arg("."))?;
        Ok(tar)
    }

    /// Writes an OCI layout with this layer.
    fn layout(&self, folder: &Path, layer: &[u8]) -> Result<()> {
        fs::create_dir_all(folder.join("blobs/sha256"))?;
        let blob = |kind: &str, bytes: &[u8]| -> Result<Value> {
            let digest = Digest::sha256(bytes).to_string();
            fs::write(folder.join("blobs").join(digest.replace(':', "/")), bytes)?;
            Ok(json!({ "mediaType": kind, "digest": digest, "size": bytes.len() }))
        };
        let mut date = Command::new(need("date")?);
        let time = format!("--date=@{}", self.seconds);
        let created = quiet(date.args(["--utc", "+%Y-%m-%dT%H:%M:%SZ", &time]))?;
        let created = created.trim_end();
        let version = env!("CARGO_PKG_VERSION");
        let config = json!({
            "created": created,
            "architecture": self.architecture(),
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/bin"],
                "Entrypoint": ["/usr/bin/quire"],
                "Cmd": ["serve", "--snapshotter"],
                "Labels": {
                    "org.opencontainers.image.title": "Quire",
                    "org.opencontainers.image.version": version,
                    "org.opencontainers.image.revision": self.hash,
                    "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
                },
            },
            "rootfs": { "type": "layers", "diff_ids": [Digest::sha256(layer).to_string()] },
            "history": [{ "created": created, "created_by": "cargo xtask node-image" }],
        });
        let layer = blob(LAYER, layer)?;
        let config = blob(CONFIG, config.to_string().as_bytes())?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config,
            "layers": [layer],
        });
        let mut manifest = blob(MANIFEST, manifest.to_string().as_bytes())?;
        manifest["platform"] = json!({ "os": "linux", "architecture": self.architecture() });
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest] });
        fs::write(folder.join("index.json"), index.to_string())?;
        fs::write(folder.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
        Ok(())
    }
}

/// Makes a tree readable for all users, and writable for its owner.
fn set_modes(path: &Path) -> Result<()> {
    let is_folder = fs::symlink_metadata(path)?.is_dir();
    let mode = if is_folder { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    if is_folder {
        for entry in fs::read_dir(path)? {
            set_modes(&entry?.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(archive: &Path, folder: &Path) {
        fs::create_dir(folder).unwrap();
        let mut tar = Command::new("tar");
        quiet(tar.arg("-xf").arg(archive).arg("--directory").arg(folder)).unwrap();
    }

    /// containerd and Docker read the archive by these files. Source: Docker image specification v1.2, "Combined Image
    /// JSON + Filesystem Changeset Format".
    #[test]
    fn the_image_has_quire_and_nothing_else() {
        // The directory of the test's program is beside that of `quire`.
        let runs = target_dir().unwrap().join("quire");
        if !runs.is_file() {
            return testing::skipped("cargo has built no quire: `cargo build --package quire-cli`");
        }
        let place = tempfile::tempdir().unwrap();
        // Any file without a dynamic linker can stand for the binary.
        let binary = place.path().join("binary");
        fs::write(&binary, "static").unwrap();
        let make = |name: &str| {
            let image = NodeImage {
                binary: &binary,
                runs: &runs,
                notices: Some(&binary),
                machine: "aarch64",
                hash: "0123456789ab",
                seconds: "1700000000",
            };
            let output = place.path().join(name);
            image.make(&output).unwrap();
            output
        };
        let [one, two] = ["one.tar", "two.tar"].map(make);
        assert!(fs::read(&one).unwrap() == fs::read(two).unwrap(), "the bytes differ");
        let files = place.path().join("files");
        unpacked(&one, &files);
        let read = |name: &str| -> Value {
            serde_json::from_slice(&fs::read(files.join(name)).unwrap()).unwrap()
        };
        let manifest = read("manifest.json");
        let tag = format!("localhost/quire:{}", env!("CARGO_PKG_VERSION"));
        assert_eq!(manifest[0]["RepoTags"], json!([tag]));
        let config = read(manifest[0]["Config"].as_str().unwrap());
        assert_eq!(config["architecture"], "arm64");
        assert_eq!(config["created"], "2023-11-14T22:13:20Z");
        assert_eq!(config["config"]["Entrypoint"], json!(["/usr/bin/quire"]));
        let layers = manifest[0]["Layers"].as_array().unwrap();
        assert_eq!(layers.len(), 1);
        let mut tar = Command::new("tar");
        tar.args(["--utc", "-tvf"]).arg(files.join(layers[0].as_str().unwrap()));
        let list = quiet(&mut tar).unwrap();
        for line in list.lines() {
            assert!(line.contains(" 0/0 ") || line.contains(" root/root "), "{line}");
            assert!(line.contains("2023-11-14 22:13"), "{line}");
        }
        for (mode, name) in [
            ("drwxr-xr-x", "./"),
            ("-rwxr-xr-x", "./usr/bin/quire"),
            ("drwxrwxrwt", "./tmp/"),
            ("-rw-r--r--", "./usr/share/doc/quire/THIRD-PARTY-NOTICES.txt"),
        ] {
            let is_it = |it: &str| it.starts_with(mode) && it.ends_with(&format!(" {name}"));
            assert!(list.lines().any(is_it), "{mode} {name} is not in\n{list}");
        }
        // The manifests for Kubernetes name this image.
        let daemon_set =
            fs::read_to_string(repository().join("dist/kubernetes/quire.yaml")).unwrap();
        assert!(daemon_set.contains(&format!("image: {tag}\n")), "{tag}");
    }

    #[test]
    fn a_dynamic_binary_is_refused() {
        let test = env::current_exe().unwrap();
        let place = tempfile::tempdir().unwrap();
        let image = NodeImage {
            binary: &test,
            runs: &test,
            notices: None,
            machine: "x86_64",
            hash: "",
            seconds: "0",
        };
        let error = image.make(&place.path().join("image.tar")).unwrap_err();
        assert!(error.to_string().contains("is not static"), "{error}");
    }
}

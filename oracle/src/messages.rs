//! Compares the committed code for the messages of containerd and Quire with the generators' output for the `.proto`
//! files.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write the code into the tree
    #[arg(long)]
    update: bool,
}

/// The services: file, package, and name of the generated code.
const FILES: [(&str, &str, &str); 5] = [
    ("snapshots.proto", "containerd.services.snapshots.v1", "snapshots.rs"),
    ("diff.proto", "containerd.services.diff.v1", "diff.rs"),
    ("content.proto", "containerd.services.content.v1", "content.rs"),
    ("counts.proto", "quire.snapshotter.v1", "counts.rs"),
    ("leases.proto", "containerd.services.leases.v1", "leases.rs"),
];
/// The files of the package `containerd.types`.
const TYPES: [&str; 2] = ["mount.proto", "descriptor.proto"];

pub fn run(args: &Args) -> Result<()> {
    let api = Path::new("crates/containerd-api");
    let files = FILES.iter().map(|it| it.0).chain(TYPES.iter().copied());
    let files = protox::compile(files, [api.join("proto")])?;
    let made = tempfile::tempdir()?;
    let generate = |folder: &str| {
        let out = made.path().join(folder);
        fs::create_dir(&out)?;
        Ok::<_, std::io::Error>(tonic_prost_build::configure().out_dir(out))
    };
    // One package refers to the other by its place in the crate.
    generate("services")?
        .extern_path(".containerd.types", "crate::types")
        .compile_fds(files.clone())?;
    generate("types")?.compile_fds(files)?;
    let services = FILES.map(|(_, package, name)| (format!("services/{package}.rs"), name));
    let types = ("types/containerd.types.rs".to_owned(), "types.rs");
    for (made_as, name) in services.into_iter().chain([types]) {
        let text = fs::read_to_string(made.path().join(made_as))?;
        let file = api.join("src").join(name);
        if args.update {
            fs::write(&file, &text)?;
        }
        let found = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        ensure!(
            found == text,
            "{} is not what the generators make: `cargo xtask oracle messages --update`",
            file.display()
        );
    }
    println!("the code for containerd's messages is what the generators make");
    Ok(())
}

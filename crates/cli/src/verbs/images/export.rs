//! `export`: writes an image as a layout, an archive, a tar, an EROFS image, a disk or an extension.

#[cfg(feature = "disk")]
mod disk;
mod disk_options;
mod extension;
pub(crate) mod reports;

use std::ffi::OsString;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use image::erofs::Flavor;
use image::verity::ImageId;
use oci::Digest;
use store::{Resolved, Store};
use transfer::export::{ArchivedImage, Compression, How, Options, Output, Target};
use transfer::import::Unsupported;
use transfer::progress::Event;

use self::disk_options::DiskOptions;
use self::reports::{
    DockerReport, ErofsReport, ExportReport, Exported, LayoutReport, TarReport, layers,
};
use crate::output::report::{self, Bytes, Seconds, count};
use crate::session::context::{Context, Outside};
use crate::session::layers;
use crate::session::output_file::{check_output, output};
use crate::session::resources::scratch;
use crate::session::signals::{give_up_when, until_signal};
use crate::verbs::VerbArgs;
use crate::verbs::containers::changes::{ChangesOptions, changes_file, export_changes};
use crate::verbs::images::file_listing;
use crate::{Answer, args};

// The image, and where it is written.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(crate) struct Export {
    /// A name, an image id or its first digits (6 or more); with changes:FILE, a container
    pub(crate) name: String,
    // This is not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(
        help = "oci:DIR[:TAG], docker-archive:FILE[:NAME], tar:FILE, erofs:FILE, gvisor:FILE, disk:FILE, sysext:FILE, confext:FILE or changes:FILE (FILE - for standard output)"
    )]
    pub(crate) target: OsString,
    /// Compress the layers of an OCI layout like this; by default as-it-was
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<args::Compression>,
    /// Overwrite an existing file
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Leave out and list sockets, and other files that a tar cannot hold
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    /// With changes:FILE, do not freeze a running container; a file that changes during the export is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
    /// With erofs:FILE or disk:FILE, store the data of each file in whole pages, so that a virtual machine can map it
    /// by DAX
    #[arg(long)]
    pub(crate) dax: bool,
    #[command(flatten)]
    pub(crate) disk: DiskOptions,
}

impl VerbArgs for Export {
    const NAME: &'static str = "export";
    const ABOUT: &'static str =
        "Export an image as an OCI layout, archive, tar, EROFS image or disk";
    const DETAILS: &'static str = "\
        `erofs:FILE` is one EROFS image with all files in it. It needs no store: `mount -t erofs -o ro FILE \
        DIR` mounts it. Equal files are stored once, and no data or metadata is lost. The same image always \
        gives the same bytes.\n\n\
        `gvisor:FILE` is an EROFS image for gVisor. To use it as a container's root, set the annotations \
        `dev.gvisor.spec.rootfs.type=erofs` and `dev.gvisor.spec.rootfs.source=FILE`. gVisor reads no extended \
        attributes, so Quire leaves out ACLs, file capabilities and labels, and prints how many files lose \
        some. With a writable layer (`dev.gvisor.spec.rootfs.overlay=memory`) gVisor hides character devices, \
        because it does not read their numbers.\n\n\
        `disk:FILE` is a raw disk for a virtual machine. It has a GPT with one partition, the same EROFS image \
        as a read-only root for the image's processor. It has no boot loader. Give the machine a kernel with \
        EROFS and a driver for the disk, and `root=PARTLABEL=root rootfstype=erofs ro` (or `root=PARTUUID=` \
        with the id that Quire prints). An initramfs that finds roots by their type, such as systemd's, works \
        as well. The same image always gives the same bytes.\n\n\
        With `--verity`, the disk also has a partition with a dm-verity hash tree, by which the kernel verifies each \
        read of the root, and Quire prints the root hash. Start the machine with `roothash=` and this hash, and without \
        `root=`: systemd finds both partitions, whose ids are the halves of the hash. `--private-key` and \
        `--certificate` add a partition with a PKCS#7 signature of the root hash, for hosts that have the certificate \
        in `/etc/verity.d` or in the kernel. The same image, key and certificate always give the same bytes.\n\n\
        With `--bootable`, the disk boots by itself on machines with UEFI: an EFI system partition has a unified \
        kernel image, which is systemd's stub with the files of `--kernel` and `--initrd`, and with a command line of \
        the root hash and `--cmdline`. The initrd must open the root by `roothash=`, as systemd's does.\n\n\
        `sysext:NAME.raw` and `confext:NAME.raw` are extensions of a host with systemd: they add files below `/usr` \
        and `/opt`, or below `/etc`. Quire checks that the image has the file `extension-release.NAME` with an `ID`, \
        and nothing outside these directories, and that `ARCHITECTURE` and the scope fit. The file is an EROFS image; with `--verity` or `--private-key`, it is \
        a disk as above. Hosts verify an unsigned one only if they find the root hash in a file `NAME.roothash` \
        beside it.\n\n\
        `--dax` is for virtual machines that get `erofs:FILE` or `disk:FILE` as persistent memory (virtio-pmem) and \
        mount it with `-o dax=always`. The guest then maps files from the host's page cache, and caches nothing \
        itself. Without `--dax`, the ends of most files are stored beside their metadata, and Linux cannot map such \
        files. With `--dax`, each small file takes 4 KiB, and the output is padded to whole 2 MiB, which pmem \
        devices need. For other disks, `--dax` only makes the image larger, and with `--verity` it is an error, \
        because dm-verity cannot map disks.\n\n\
        `changes:FILE` is the tar of a container's changes: the layer that `quire commit` would add to its image. \
        Quire copies the changes of a running container as `quire snapshot` does, so the container is frozen only for a \
        moment.";
    const EXAMPLES: &'static str = "quire export app oci:./layout\n  quire export app erofs:app.erofs\n  quire export app tar:- | tar t\n  quire export web changes:changes.tar\n  quire export app disk:app.disk --verity";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        export(context, self)
    }
}

pub(crate) fn export(context: &Context, args: &Export) -> anyhow::Result<Answer> {
    if let Some(file) = changes_file(&args.target) {
        check_options_of_changes(args)?;
        let options = ChangesOptions { force: args.force, no_pause: args.no_pause };
        return export_changes(context, &args.name, &file, options);
    }
    if args.no_pause {
        bail!("--no-pause needs changes:FILE");
    }
    let start = Instant::now();
    let target = Target::parse(&args.target)?;
    check(context, args, &target)?;
    let store = context.open_with(&args.name)?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    // An import of the output would have the origin `local`, so the policies must accept the image now.
    let permitted = crate::session::policy::permit(context, &store, found)?;
    let found = permitted.found();
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let progress = context.progress();
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let scratch = scratch(&store);
    let options = Options {
        threads,
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let run = ExportRun { context, args, store: &store, found, options: &options };
    let work = || -> anyhow::Result<Exported> {
        // `gc` keeps the image and its objects while it is open.
        let _open = store.open_found(found)?;
        run.write(&target)
    };
    let result = until_signal(&cancel, work)?;
    progress.finish();
    let exported = result?;
    if matches!(
        &target,
        Target::DockerArchive { file: Output::Stdout, .. }
            | Target::Tar(Output::Stdout)
            | Target::Erofs { file: Output::Stdout, .. }
            | Target::Disk(Output::Stdout)
            | Target::Extension { file: Output::Stdout, .. }
    ) {
        return Ok(Answer::Yes);
    }
    let told = ExportReport {
        exported,
        image: found.image.to_string(),
        seconds: Seconds(start.elapsed().as_secs_f64()),
    };
    if context.json {
        report::json(&told)?;
    } else if !context.is_quiet() {
        report::line(&told.text())?;
    }
    Ok(Answer::Yes)
}

/// Refuses options that do not apply to the changes of a container, which are a plain tar.
fn check_options_of_changes(args: &Export) -> anyhow::Result<()> {
    if args.compression.is_some() {
        bail!(
            "--compression does not work with changes:FILE: write to - and pipe it into a \
            compressor"
        );
    }
    if args.dax {
        bail!("--dax needs erofs:FILE or disk:FILE");
    }
    args.disk.check(None)
}

/// Checks options and output before anything is opened.
fn check(context: &Context, args: &Export, target: &Target) -> anyhow::Result<()> {
    args.disk.check(Some(target))?;
    match target {
        Target::Erofs { flavor: Flavor::Gvisor, .. } if args.dax => {
            bail!("--dax does not work with gvisor:FILE, which gVisor always maps: leave it out")
        }
        Target::Disk(_) if args.dax && args.disk.is_verified() => bail!(
            "--dax has no effect with a hash tree: dm-verity, which verifies each read, cannot map a disk. Leave out one \
            of them"
        ),
        Target::Erofs { .. } | Target::Disk(_) => {}
        _ if args.dax => bail!("--dax needs erofs:FILE or disk:FILE"),
        _ => {}
    }
    let (what, output) = match target {
        Target::Layout { .. } => return Ok(()),
        Target::DockerArchive { file, .. } => ("layers of docker archives", file),
        Target::Tar(file) => ("a flat tar", file),
        Target::Erofs { file, .. } => ("an EROFS image", file),
        Target::Disk(file) => ("a disk", file),
        Target::Extension { file, .. } => ("an extension", file),
    };
    if matches!(args.compression, Some(args::Compression::Gzip | args::Compression::Zstd)) {
        bail!("{what} cannot be compressed: write to - and pipe it into a compressor");
    }
    check_output(context, output, args.force)
}

struct ExportRun<'a> {
    context: &'a Context,
    args: &'a Export,
    store: &'a Store,
    found: &'a Resolved,
    options: &'a Options<'a>,
}

impl ExportRun<'_> {
    fn write(&self, target: &Target) -> anyhow::Result<Exported> {
        match target {
            Target::Layout { directory, tag } => self.layout(directory, tag.as_deref()),
            Target::DockerArchive { file, name } => {
                let manifest = self.manifest()?;
                let names: Vec<_> = name.iter().chain(&self.found.name).take(1).cloned().collect();
                let images = [ArchivedImage { manifest, names: names.clone() }];
                let written = self.output(file, |out| {
                    Ok(transfer::export::to_docker_archive(self.store, &images, out, self.options)?)
                })?;
                let [written] = &written[..] else { bail!("the archive has no image") };
                Ok(Exported::Docker(DockerReport {
                    config: written.config.to_string(),
                    names: report::texts(&names),
                    layers: report::texts(&written.layers),
                    bytes: Bytes(written.bytes),
                }))
            }
            Target::Tar(file) => self.tar(file, &self.found.image),
            Target::Erofs { flavor: Flavor::Linux, file } => self.erofs(self.flavor(), file),
            Target::Erofs { flavor, file } => self.erofs(*flavor, file),
            Target::Disk(file) => self.disk(file),
            Target::Extension { kind, file } => self.extension(*kind, file),
        }
    }

    /// Returns the flavor of images for Linux.
    fn flavor(&self) -> Flavor {
        if self.args.dax { Flavor::Dax } else { Flavor::Linux }
    }

    fn manifest(&self) -> anyhow::Result<Digest> {
        self.found.manifest.with_context(|| layers::none(&self.args.name, ""))
    }

    fn layout(&self, directory: &Path, tag: Option<&str>) -> anyhow::Result<Exported> {
        let manifest = self.manifest()?;
        let compression = match self.args.compression {
            None | Some(args::Compression::AsItWas) => Compression::AsItWas,
            Some(args::Compression::Gzip) => Compression::Gzip,
            Some(args::Compression::Zstd) => Compression::Zstd,
            Some(args::Compression::None) => Compression::None,
        };
        let plan = transfer::export::plan_for_layout(
            self.store,
            &manifest,
            compression,
            directory,
            self.options,
        )?;
        let (image, options) = (Some(&self.found.image), self.options);
        let written =
            transfer::export::to_layout(self.store, &plan, image, directory, tag, options)
                .map_err(|error| Outside::Layout(directory.to_owned()).note(error.into()))?;
        let anew = plan.layers.iter().filter(|it| it.how == How::Compressed).count();
        if anew > 0 && compression == Compression::AsItWas && written.blobs > 0 {
            self.context.remark(&format!(
                "{anew} of {} {} compressed again, because the store did not keep the originals \
                (`pull --keep-layers` does): the manifest is now {}",
                count(plan.layers.len(), "layer"),
                if anew == 1 { "was" } else { "were" },
                plan.digest
            ));
        }
        Ok(Exported::Layout(LayoutReport {
            manifest: plan.digest.to_string(),
            unchanged: plan.is_unchanged,
            layers: layers(&plan),
            blobs_added: written.blobs,
            bytes_added: Bytes(written.bytes),
            blobs_reused: written.reused,
            signatures: written.signatures,
        }))
    }

    fn tar(&self, file: &Output, image: &ImageId) -> anyhow::Result<Exported> {
        let unsupported = match self.args.skip_unsupported {
            true => Unsupported::Skip,
            false => Unsupported::Refuse,
        };
        let written = self.output(file, |out| {
            Ok(transfer::export::to_tar(self.store, image, out, unsupported, self.options)?)
        })?;
        for path in &written.skipped {
            let path = file_listing::name(path);
            self.context.remark(&format!("leaving out a file that a tar cannot contain: {path}"));
        }
        Ok(Exported::Tar(TarReport {
            entries: written.entries,
            bytes: Bytes(written.bytes),
            skipped: report::paths(&written.skipped),
        }))
    }

    fn erofs(&self, flavor: Flavor, file: &Output) -> anyhow::Result<Exported> {
        let written = self.output(file, |out| {
            Ok(transfer::export::to_erofs(
                self.store,
                &self.found.image,
                flavor,
                out,
                self.options,
            )?)
        })?;
        if written.without_xattrs > 0 {
            let files = match written.without_xattrs {
                1 => "1 file has".to_owned(),
                many => format!("{many} files have"),
            };
            self.context.remark(&format!(
                "{files} xattrs (ACLs, capabilities, labels), which gVisor cannot read: leaving \
                them out"
            ));
        }
        if written.without_numbers > 0 {
            let devices = match written.without_numbers {
                1 => "1 device has no number".to_owned(),
                many => format!("{many} devices have no numbers"),
            };
            self.context.remark(&format!(
                "{devices} in gVisor, which hides character devices below a writable layer"
            ));
        }
        Ok(Exported::Erofs(ErofsReport {
            inodes: written.inodes,
            bytes: Bytes(written.bytes),
            without_xattrs: written.without_xattrs,
            without_numbers: written.without_numbers,
        }))
    }

    #[cfg(not(feature = "disk"))]
    #[expect(clippy::unused_self, reason = "same signature as with the feature")]
    fn disk(&self, _: &Output) -> anyhow::Result<Exported> {
        bail!(
            "this build of Quire writes no disks: build it with the feature `disk`, or use erofs:FILE"
        )
    }

    /// Like [`output`], with the options of this export.
    fn output<T>(
        &self,
        file: &Output,
        write: impl FnOnce(&mut dyn Write) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        output(file, self.args.force, write, || (self.options.progress)(Event::Committing))
    }
}

//! `serve --lazy`, and images whose devices it fills.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use image::verity::DeviceId;
use kernel::process::{Signal, Signals};
use oci::blobs::BlobSource;
use serve::lazy::{LazyService, Program, Replace, Supply, Surroundings, folder_of};
use store::{LendDevices, OpenOptions, Permitted, PermittedImage, Store};
use transfer::lazy::{KeptBlobs, LayerIndex};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::report;
use crate::signals::until_signal;

/// Where indexes and blobs come from: the store.
struct StoreSupply<'a> {
    store: &'a Store,
    kept: KeptBlobs<'a>,
}

impl Supply for StoreSupply<'_> {
    fn index(
        &self,
        device: &DeviceId,
    ) -> Result<Option<LayerIndex>, Box<dyn std::error::Error + Send + Sync>> {
        Ok(LayerIndex::load(self.store, device)?)
    }

    fn blobs(&self, _: &LayerIndex) -> &dyn BlobSource {
        &self.kept
    }
}

pub(crate) fn serve(context: &Context, args: &args::Serve) -> anyhow::Result<Answer> {
    if !context.who().is_host_root() {
        bail!("serve --lazy: only the host's root may wait for reads of files");
    }
    if let Some(folder) = &args.keeper {
        return keep(context, folder);
    }
    let store = context.open(OpenOptions::write())?;
    let folder = folder_of(store.path()).context("cannot look at the store's directory")?;
    let stop = AtomicBool::new(false);
    let surroundings = Surroundings {
        supply: &StoreSupply { store: &store, kept: KeptBlobs(&store) },
        folder: &folder,
        keeper: &again(context, &["--keeper".into(), folder.clone().into()])?,
        stop: &stop,
    };
    let replace = if args.replace { Replace::Yes } else { Replace::No };
    let ready = || {
        if !context.quiet {
            // Whoever started it may have gone on.
            let _told =
                report::line(&format!("fills the lazy devices of {}", store.path().display()));
        }
    };
    let left = until_signal(&stop, || serve::lazy::serve(&store, &surroundings, replace, ready))??;
    if left > 0 {
        context.remark(&format!(
            "{left} lazy devices are in use: their readers get I/O errors in ten seconds, until `quire serve --lazy` runs again"
        ));
    }
    Ok(Answer::Yes)
}

fn keep(context: &Context, folder: &Path) -> anyhow::Result<Answer> {
    // Who ends the service does not mean the keeper. They stay blocked.
    let _signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.context("cannot use standard input")?;
    // It may find that another service is there already.
    serve::lazy::keep(socket, folder, &again(context, &[])?)?;
    Ok(Answer::Yes)
}

/// This program, as a service of the same store.
fn again(context: &Context, more: &[OsString]) -> anyhow::Result<Program> {
    let path = std::env::current_exe().context("cannot tell which program this is")?;
    let store = context.store_directory()?;
    let mut arguments: Vec<OsString> = vec!["--store".into(), store.into(), "serve".into()];
    arguments.push("--lazy".into());
    arguments.extend_from_slice(more);
    Ok(Program { path, arguments })
}

/// Asks the service as soon as a device is lazy.
struct Lender<'a> {
    store: &'a Store,
    service: OnceCell<LazyService>,
}

impl LendDevices for Lender<'_> {
    fn lend(&self, device: &DeviceId) -> Result<File, Box<dyn std::error::Error + Send + Sync>> {
        let service = match self.service.get() {
            Some(service) => service,
            None => {
                let folder = folder_of(self.store.path())?;
                let found = LazyService::connect(&folder)?.ok_or(
                    "no service fills the lazy devices of this store: start `quire serve --lazy`",
                )?;
                self.service.get_or_init(|| found)
            }
        };
        Ok(service.lend(device)?)
    }
}

/// Opens an image; if `is_lazy`, one of which not every byte has to be here.
pub(crate) fn open(
    store: &Store,
    image: Permitted,
    is_lazy: bool,
) -> anyhow::Result<PermittedImage> {
    Ok(match is_lazy {
        true => image.open_lazy(store, &Lender { store, service: OnceCell::new() })?,
        false => image.open(store)?,
    })
}

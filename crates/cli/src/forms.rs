//! The forms of images: which one is best here, and `convert`.

use anyhow::Context as _;
use kernel::features::KernelVersion;
use oci::import::Stored;
use oci::native::Dedup;
use store::{Form, OpenOptions, RefName};

use crate::Answer;
use crate::args::{self, DedupWish, FormOptions, FormWish, TreeOptions};
use crate::context::Context;
use crate::import::{self, Wishes};

/// How an image is to be stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    pub(crate) form: Form,
    pub(crate) dedup: Dedup,
}

/// As composefs has it.
pub(crate) const OBJECTS: Choice = Choice { form: Form::Objects, dedup: Dedup::Store };

/// The first Linux version whose EROFS shares pages between images.
pub(crate) const SHARES_PAGES: KernelVersion = KernelVersion { major: 7, minor: 0 };

/// What `auto` is here, and why.
pub(crate) fn auto() -> (Form, &'static str) {
    match KernelVersion::running() {
        Some(version) if version >= SHARES_PAGES => {
            (Form::Packed, "this kernel shares pages between EROFS images")
        }
        _ => (Form::Objects, "before Linux 7.0 only objects are shared in memory between images"),
    }
}

pub(crate) fn choose(options: &FormOptions) -> Choice {
    let form = match options.form {
        FormWish::Auto => auto().0,
        FormWish::Objects => Form::Objects,
        FormWish::Packed => Form::Packed,
        FormWish::Tar => Form::Tar,
    };
    let dedup = match options.dedup {
        DedupWish::Store => Dedup::Store,
        DedupWish::Layer => Dedup::Layer,
    };
    Choice { form, dedup }
}

pub(crate) fn convert(context: &Context, args: &args::Convert) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = crate::names::resolve(&store, &args.name)?;
    let new: Option<RefName> = args.new.as_deref().map(str::parse).transpose()?;
    let name = new.as_ref().or(found.name.as_ref());
    let wishes = Wishes {
        name,
        tree: &TreeOptions::default(),
        form: choose(&args.form),
        platform: None,
        budget: usize::try_from(args.memory << 20).context("--memory is too much")?,
    };
    // From here on `gc` leaves the image alone.
    let _open = store.open_image(&found.image)?;
    let image = Stored { image: &found.image, manifest: found.manifest.as_ref() };
    let done = import::with_options(context, &store, &wishes, |options| {
        oci::import::convert(&store, &image, options)
    })?;
    import::tell(context, &done)?;
    Ok(Answer::Yes)
}

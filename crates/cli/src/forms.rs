//! The forms of images: which one is best here, and `convert`.

use anyhow::Context as _;
use image::erofs::OverlayXattrs;
use kernel::features::{Can, page_sharing};
use oci::import::Stored;
use oci::native::Dedup;
use store::{Form, OpenOptions, RefName};

use crate::Answer;
use crate::args::{self, DedupWish, FormOptions, FormWish, OverlayXattrsWish, TreeOptions};
use crate::context::Context;
use crate::import::{self, Wishes};

/// How an image is to be stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    pub(crate) form: Form,
    pub(crate) dedup: Dedup,
    pub(crate) overlay: OverlayXattrs,
}

/// As composefs has it.
pub(crate) const OBJECTS: Choice = Choice::of(Form::Objects);

impl Choice {
    /// All that is not said is as it usually is.
    pub(crate) const fn of(form: Form) -> Self {
        Self { form, dedup: Dedup::Store, overlay: OverlayXattrs::Composefs }
    }
}

/// What `auto` is here, and why.
pub(crate) fn auto() -> (Form, &'static str) {
    match page_sharing().can {
        Can::Yes => (Form::Packed, "this kernel has equal files of all images in memory once"),
        Can::No => (Form::Objects, "this kernel has only equal objects in memory once"),
        Can::Unknown => (Form::Objects, "it is not known what else this kernel can"),
    }
}

pub(crate) fn choose(options: &FormOptions) -> anyhow::Result<Choice> {
    choose_again(options, None)
}

/// As [`choose`], for an image that may be here already: left to us, it stays in its form.
pub(crate) fn choose_again(options: &FormOptions, here: Option<Form>) -> anyhow::Result<Choice> {
    let overlay = match options.overlay_xattrs {
        OverlayXattrsWish::Composefs => OverlayXattrs::Composefs,
        OverlayXattrsWish::Inline => OverlayXattrs::Inline,
        OverlayXattrsWish::Shared => OverlayXattrs::Shared,
    };
    let needs_overlay = overlay != OverlayXattrs::default();
    let form = match options.form {
        FormWish::Auto if needs_overlay => Form::Objects,
        FormWish::Packed | FormWish::Tar if needs_overlay => {
            anyhow::bail!(
                "--overlay-xattrs is for --form objects: others have no overlay below them"
            );
        }
        FormWish::Auto => here.unwrap_or_else(|| auto().0),
        FormWish::Objects => Form::Objects,
        FormWish::Packed => Form::Packed,
        FormWish::Tar => Form::Tar,
    };
    let dedup = match options.dedup {
        DedupWish::Store => Dedup::Store,
        DedupWish::Layer => Dedup::Layer,
    };
    Ok(Choice { form, dedup, overlay })
}

pub(crate) fn convert(context: &Context, args: &args::Convert) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = crate::names::resolve(&store, &args.name)?;
    let new: Option<RefName> = args.new.as_deref().map(str::parse).transpose()?;
    let name = new.as_ref().or(found.name.as_ref());
    let wishes = Wishes {
        name,
        tree: &TreeOptions::default(),
        form: choose(&args.form)?,
        platform: None,
        budget: usize::try_from(args.memory << 20).context("--memory is too much")?,
    };
    // From here on `gc` leaves the image alone.
    let _open = store.open_image(&found.image)?;
    let image = Stored { image: &found.image, manifest: found.manifest.as_ref() };
    let done = import::with_options(context, &store, &wishes, |options| {
        oci::import::convert(&store, &image, options)
    })??;
    import::tell(context, &done)?;
    Ok(Answer::Yes)
}

/// As options and records have it.
pub(crate) const fn word(form: Form) -> &'static str {
    match form {
        Form::Objects => "objects",
        Form::Packed => "packed",
        Form::Tar => "tar",
    }
}

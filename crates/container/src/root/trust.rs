//! Whether an image may be mounted as it is, and how its reads are verified.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::str::FromStr;

use image::erofs::read::Owners;
use image::verity::ImageId;
use kernel::mount::Backing;
use kernel::version::KernelVersion;
use store::{ContentsError, Form, OpenImage, PermittedImage, Resolved, Store, VerifyError};

use crate::owner::{OwnerError, check_image};
use crate::root::{Checked, WritableWish};

/// How far an image is trusted, and how it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trust {
    /// How reads are verified.
    pub verity: VerityPolicy,
    /// The only image that will do; it is hashed first.
    pub digest: Option<ImageId>,
    /// The images with which pages of equal files are shared.
    pub domain: PageDomain,
    /// What the kernel reads an image over devices from.
    pub backing: Backing,
}

impl Default for Trust {
    /// The kernel checks what it can, and pages are shared within the store.
    fn default() -> Self {
        Self {
            verity: VerityPolicy::Auto,
            digest: None,
            domain: PageDomain::OfStore,
            backing: Backing::File,
        }
    }
}

/// How reads from an image are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerityPolicy {
    /// The kernel, by fs-verity, or the mount is refused.
    Require,
    /// The kernel if it can; otherwise the import is trusted.
    Auto,
    /// Reads are not verified.
    Off,
}

/// The images with which pages of equal files are in memory once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageDomain {
    /// Those of the same store.
    OfStore,
    /// Those of the same name.
    Named(String),
    /// None.
    Alone,
}

/// The most bytes in the name of a domain: what an option of a mount takes.
const DOMAIN_MAX: usize = 200;

/// No name of a domain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "--domain: \"{}\" is not a domain name: use 1 to {DOMAIN_MAX} letters, digits, '-', '_' and '.'",
    .0.escape_debug()
)]
pub struct DomainError(String);

impl FromStr for PageDomain {
    type Err = DomainError;

    fn from_str(text: &str) -> Result<Self, DomainError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        match text {
            "none" => Ok(Self::Alone),
            _ if text.is_empty() || text.len() > DOMAIN_MAX || !text.bytes().all(is_plain) => {
                Err(DomainError(text.to_owned()))
            }
            _ => Ok(Self::Named(text.to_owned())),
        }
    }
}

/// Why an image is not mounted as it is asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// Another image than the one that is demanded.
    #[error("{name} is image {found}, not {wanted} as --digest demands")]
    Other {
        /// The image's name.
        name: String,
        /// Its id.
        found: ImageId,
        /// The id that is demanded.
        wanted: Box<ImageId>,
    },
    /// The kernel cannot check it.
    #[error(
        "--verity require: image {0} has no fs-verity here, so the kernel cannot check reads: use a store on a file \
         system with fs-verity (see `quire doctor`), or --verity auto"
    )]
    NoVerity(ImageId),
    /// The kernel is too old for its form.
    #[error(
        "{name} has the form {form}, which needs Linux {NATIVE} or newer, and this is {running}: `quire convert \
         --form objects {name}`"
    )]
    Form {
        /// The image's name.
        name: String,
        /// Its form.
        form: Form,
        /// This kernel.
        running: KernelVersion,
    },
    /// Its digest is not that of its name, or cannot be computed.
    #[error(transparent)]
    Image(#[from] VerifyError),
    /// Its metadata is not sound.
    #[error("cannot read image {image}")]
    Contents {
        /// The image.
        image: ImageId,
        /// Cause.
        source: Box<ContentsError>,
    },
    /// The store's directory cannot be looked at.
    #[error("cannot look at {}", path.display())]
    Store {
        /// The directory.
        path: PathBuf,
        /// The disk's answer.
        source: std::io::Error,
    },
    /// Another user can change it.
    #[error(transparent)]
    Owner(#[from] OwnerError),
}

/// An image that a policy allowed, and of which it is known who can change it: roots are made of these alone. Only
/// [`TrustedImage::to_mount`] and [`TrustedImage::to_run`] make one.
#[derive(Debug)]
pub struct TrustedImage {
    permitted: PermittedImage,
    trust: Trust,
}

impl TrustedImage {
    /// An image to mount, or to make a bundle of. If another user could change it, the kernel must hold it to its digest:
    /// image and data are sealed, and were measured. Without a wish, `writable` may become a filestore.
    ///
    /// # Errors
    /// [`TrustError`] when it is not mounted at all.
    pub fn to_mount(
        store: &Store,
        permitted: PermittedImage,
        trust: Trust,
        writable: Option<&WritableWish>,
    ) -> Result<Self, TrustError> {
        let trust = of_image(store, permitted.image(), trust, writable)?;
        Ok(Self { permitted, trust })
    }

    /// An image to run. No other user may be able to change it.
    ///
    /// # Errors
    /// [`OwnerError`] when one can.
    pub fn to_run(
        store: &Store,
        permitted: PermittedImage,
        trust: Trust,
    ) -> Result<Self, OwnerError> {
        check_image(store, permitted.image())?;
        Ok(Self { permitted, trust })
    }

    /// The open image.
    #[must_use]
    pub const fn image(&self) -> &OpenImage {
        self.permitted.image()
    }

    /// The name and the manifest that lead to it.
    #[must_use]
    pub const fn found(&self) -> &Resolved {
        self.permitted.found()
    }

    /// Whether it may be used as it is asked for, by whoever makes a root without [`make`](super::make()).
    ///
    /// # Errors
    /// [`TrustError`].
    pub fn check(&self) -> Result<(), TrustError> {
        check(self.image(), &self.name(), &self.trust).map(drop)
    }

    /// The name that led to it, or its id.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.found().name.as_ref();
        name.map_or_else(|| self.image().id.to_string(), ToString::to_string)
    }

    /// How it is verified and read.
    pub(super) const fn trust(&self) -> &Trust {
        &self.trust
    }
}

fn of_image(
    store: &Store,
    image: &OpenImage,
    trust: Trust,
    writable: Option<&WritableWish>,
) -> Result<Trust, TrustError> {
    let exposure = store.exposure_of(image).map_err(OwnerError::Disk)?;
    let Some(exposure) = exposure else { return Ok(trust) };
    // The file of a writable layer is copied from one that the store has.
    let is_filestore = matches!(writable, None | Some(WritableWish::Filestore(..)));
    if !image.kernel_verity || trust.verity == VerityPolicy::Off || is_filestore {
        return Err(OwnerError::Image { image: image.id, exposure }.into());
    }
    // Sealed does not mean that Quire wrote it: what our reader refuses, the kernel does not see.
    let read = store.tree(image, Owners::FirstMet);
    read.map_err(|source| TrustError::Contents { image: image.id, source: Box::new(source) })?;
    Ok(Trust { verity: VerityPolicy::Require, ..trust })
}

/// Decides whether the image may be used, and who checks what is read from it.
pub(super) fn check(image: &OpenImage, name: &str, trust: &Trust) -> Result<Checked, TrustError> {
    if let Some(wanted) = &trust.digest
        && *wanted != image.id
    {
        let (name, wanted) = (name.to_owned(), Box::new(*wanted));
        return Err(TrustError::Other { name, found: image.id, wanted });
    }
    match (trust.verity, image.kernel_verity) {
        (VerityPolicy::Require | VerityPolicy::Auto, true) => return Ok(Checked::ByKernel),
        (VerityPolicy::Require, false) => return Err(TrustError::NoVerity(image.id)),
        (VerityPolicy::Auto, false) | (VerityPolicy::Off, _) => {}
    }
    // With its digest demanded, nobody has to trust the store's names.
    if trust.digest.is_some() && !image.kernel_verity {
        image.verify()?;
    }
    Ok(Checked::AtImport)
}

/// The first Linux version whose EROFS knows long prefixes of xattrs, blocks of 512 bytes, and addresses over all devices.
const NATIVE: KernelVersion = KernelVersion { major: 6, minor: 4 };

/// Older kernels would only say that something is invalid.
pub(super) fn check_form(image: &OpenImage, name: &str) -> Result<(), TrustError> {
    match KernelVersion::running() {
        Some(running) if running < NATIVE && image.form != Form::Objects => {
            Err(TrustError::Form { name: name.to_owned(), form: image.form, running })
        }
        _ => Ok(()),
    }
}

/// With whom pages are shared, by the name that the kernel is given.
pub(super) fn domain(store: &Store, domain: &PageDomain) -> Result<Option<String>, TrustError> {
    match domain {
        PageDomain::Alone => Ok(None),
        PageDomain::Named(name) => Ok(Some(name.clone())),
        PageDomain::OfStore => {
            let path = store.path();
            let failed = |source| TrustError::Store { path: path.to_owned(), source };
            let stat = std::fs::metadata(path).map_err(failed)?;
            // The directory, whatever its path is: all images in it were written by who may write there.
            let named = format!("quire {} {}", stat.dev(), stat.ino());
            let digest = store::Digest::sha256(named.as_bytes()).to_string();
            Ok(Some(format!("quire-{}", &digest["sha256:".len()..][..32])))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_domains() {
        let named = |name: &str| Ok(PageDomain::Named(name.to_owned()));
        let long = "x".repeat(DOMAIN_MAX + 1);
        let cases = [
            ("none", Ok(PageDomain::Alone)),
            ("a.B-1_", named("a.B-1_")),
            (&long[1..], named(&long[1..])),
            (&long, Err(DomainError(long.clone()))),
            ("", Err(DomainError(String::new()))),
            ("a,b", Err(DomainError("a,b".to_owned()))),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), expect, "{text}");
        }
    }
}

//! Decides if an image may be mounted as requested, and how its reads are verified.

use std::os::unix::fs::MetadataExt as _;
use std::str::FromStr;

use image::erofs::read::Owners;
use image::verity::ImageId;
use kernel::mount::Backing;
use kernel::version::KernelVersion;
use serde::{Deserialize, Serialize};
use store::{Form, OpenImage, OperationError, PermittedImage, Resolved, Store, VerifyError};

use crate::root::{Checked, WritableChoice};
use crate::store_ownership::{OwnerError, check_image};
use crate::stored_choices::{self, StoredBacking};

/// How far an image is trusted, and how it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    pub verity: VerityPolicy,
    /// Required id of the image, whose file is hashed first.
    #[serde(with = "stored_choices::image_id")]
    pub digest: Option<ImageId>,
    /// Images with which pages of equal files are shared.
    pub domain: PageDomain,
    /// Source from which the kernel reads an image over devices.
    #[serde(with = "StoredBacking")]
    pub backing: Backing,
}

impl Default for Trust {
    /// The kernel verifies reads if it can, and pages are shared within the store.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerityPolicy {
    /// By the kernel with fs-verity; otherwise the mount is refused.
    Require,
    /// By the kernel if it can; otherwise the data is trusted, because the import has verified it.
    Auto,
    /// Reads are not verified.
    Off,
}

/// Images whose equal files share pages in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageDomain {
    /// Images of the same store.
    OfStore,
    /// Images with the same domain name.
    Named(String),
    /// Pages are not shared.
    Alone,
}

/// Maximum length of a domain's name in bytes, limited by the mount option.
const DOMAIN_MAX: usize = 200;

/// Error of an invalid domain name.
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

/// Reason why an image is not mounted as requested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// The image is not the required one.
    #[error("{name} is image {found}, not {wanted} as --digest requires")]
    Other {
        name: String,
        /// Id of the image.
        found: ImageId,
        /// The required id.
        wanted: Box<ImageId>,
    },
    /// The kernel cannot verify the image.
    #[error(
        "--verity require: image {0} has no fs-verity in this store, so the kernel cannot check \
        reads: use a store on a file system with fs-verity (see `quire doctor`), or --verity auto"
    )]
    NoVerity(ImageId),
    /// The kernel is too old for the image's form.
    #[error(
        "{name} has the form {form}, which needs Linux {NATIVE} or newer, but this is {running}: \
        `quire convert --form objects {name}`"
    )]
    Form {
        name: String,
        form: Form,
        /// Version of this kernel.
        running: KernelVersion,
    },
    /// The image's digest does not match its name, or cannot be computed.
    #[error(transparent)]
    Image(#[from] VerifyError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// Another user can change the image.
    #[error(transparent)]
    Owner(#[from] OwnerError),
}

/// An image that a policy allowed, and for which it was checked who can write to it. Only such images become roots.
/// Only [`TrustedImage::to_mount`] and [`TrustedImage::to_run`] return one.
#[derive(Debug)]
pub struct TrustedImage {
    permitted: PermittedImage,
    trust: Trust,
}

impl TrustedImage {
    /// Returns an image to mount, or to make a bundle from. If another user could change the image, the kernel must
    /// verify it: the image and its data must have fs-verity and the right digests. `writable` is `None` if it is
    /// unknown, so a filestore may be used.
    ///
    /// # Errors
    /// [`TrustError`] if the image must not be mounted.
    pub fn to_mount(
        store: &Store,
        permitted: PermittedImage,
        trust: Trust,
        writable: Option<&WritableChoice>,
    ) -> Result<Self, TrustError> {
        let trust = of_image(store, permitted.image(), trust, writable)?;
        Ok(Self { permitted, trust })
    }

    /// Returns an image to run, which no other user may be able to change.
    ///
    /// # Errors
    /// [`OwnerError`] if another user can change the image.
    pub fn to_run(
        store: &Store,
        permitted: PermittedImage,
        trust: Trust,
    ) -> Result<Self, OwnerError> {
        check_image(store, permitted.image())?;
        Ok(Self { permitted, trust })
    }

    #[must_use]
    pub const fn image(&self) -> &OpenImage {
        self.permitted.image()
    }

    /// Returns the name and the manifest that lead to the image.
    #[must_use]
    pub const fn found(&self) -> &Resolved {
        self.permitted.found()
    }

    /// Checks that the image may be used as requested, for callers that do not call [`make`](super::make()).
    pub fn check(&self) -> Result<(), TrustError> {
        check(self.image(), &self.name(), &self.trust).map(drop)
    }

    /// Returns the name that led to the image, or its id.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.found().name.as_ref();
        name.map_or_else(|| self.image().id.to_string(), ToString::to_string)
    }

    /// Returns how the image is verified and read.
    pub(super) const fn trust(&self) -> &Trust {
        &self.trust
    }
}

fn of_image(
    store: &Store,
    image: &OpenImage,
    trust: Trust,
    writable: Option<&WritableChoice>,
) -> Result<Trust, TrustError> {
    let exposure = store.exposure_of(image).map_err(OwnerError::Disk)?;
    let Some(exposure) = exposure else { return Ok(trust) };
    // A filestore is copied from a template in the store, which the other user could also change.
    let is_filestore = matches!(writable, None | Some(WritableChoice::Filestore(..)));
    if !image.kernel_verity || trust.verity == VerityPolicy::Off || is_filestore {
        return Err(OwnerError::Image { image: image.id, exposure }.into());
    }
    // An image with fs-verity was not necessarily written by Quire, and the kernel must not parse an image that
    // Quire's own reader refuses.
    let read = store.tree(image, Owners::FirstMet);
    read.map_err(OperationError::of("read image", image.id))?;
    Ok(Trust { verity: VerityPolicy::Require, ..trust })
}

/// Decides if the image may be used, and how its reads are verified.
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
    // If a digest is required, the store's names need not be trusted.
    if trust.digest.is_some() && !image.kernel_verity {
        image.verify()?;
    }
    Ok(Checked::AtImport)
}

/// First Linux version whose EROFS supports long xattr prefixes, blocks of 512 bytes, and addresses over all devices.
const NATIVE: KernelVersion = KernelVersion { major: 6, minor: 4 };

/// Checks the image's form, because older kernels would only report an invalid argument.
pub(super) fn check_form(image: &OpenImage, name: &str) -> Result<(), TrustError> {
    match KernelVersion::running() {
        Some(running) if running < NATIVE && image.form != Form::Objects => {
            Err(TrustError::Form { name: name.to_owned(), form: image.form, running })
        }
        _ => Ok(()),
    }
}

/// Returns the kernel's name of the domain in which pages are shared.
pub(super) fn domain(store: &Store, domain: &PageDomain) -> Result<Option<String>, TrustError> {
    match domain {
        PageDomain::Alone => Ok(None),
        PageDomain::Named(name) => Ok(Some(name.clone())),
        PageDomain::OfStore => {
            let path = store.path();
            let stat = std::fs::metadata(path).map_err(OperationError::at("examine", path))?;
            // The name is derived from the directory's inode, independent of its path: all images in it were written
            // by users with access to it.
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

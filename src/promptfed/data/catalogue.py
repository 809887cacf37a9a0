"""The datasets of the papers: where they come from and how they are prepared."""

from dataclasses import dataclass

Channels = tuple[float, ...]

_HALF: Channels = (0.5, 0.5, 0.5)
_PHOTO_MEAN: Channels = (0.485, 0.456, 0.406)  # ImageNet's, usual for photos
_PHOTO_STD: Channels = (0.229, 0.224, 0.225)

_LAY_OUT = "and pass dataset.name=PATH dataset.size=224 with PATH laid out"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One dataset: a hub id, a folder a package manager installs, or files to fetch by hand."""

    title: str
    classes: int
    size: int  # images become size x size
    images: int | None = None  # in all pooled splits, where known
    domains: int = 0  # or sites; 0: none
    mean: Channels = _PHOTO_MEAN
    std: Channels = _PHOTO_STD
    hub: str | None = None
    config: str | None = None  # which configuration of the hub dataset
    folder: str | None = None  # idx files, taken instead of the hub where they exist
    channels: int = 3
    image_column: str | None = None  # none: found by type
    label_column: str | None = None
    domain_column: str | None = None
    splits: tuple[str, ...] = ()  # the source splits that are pooled; empty: all
    names: tuple[str, ...] = ()  # class names, where the source has numbers
    keep: tuple[str, ...] = ()  # a subset of the source's classes
    manual: str | None = None  # what to fetch and how to lay it out
    notes: str = ""


_FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_DOMAINNET_10 = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip

CATALOGUE: dict[str, Entry] = {
    "digits": Entry(
        title="Handwritten digits of scikit-learn",
        classes=10,
        size=32,
        images=1_797,
        mean=_HALF,
        std=_HALF,
        notes="comes with scikit-learn: 1,797 grey images of 8 x 8 pixels, no download",
    ),
    "mnist": Entry(
        title="MNIST",
        classes=10,
        size=32,
        images=70_000,
        mean=(0.1307,) * 3,
        std=(0.3081,) * 3,
        hub="ylecun/mnist",
        label_column="label",
    ),
    "fashion-mnist": Entry(
        title="Fashion-MNIST",
        classes=10,
        size=32,
        images=70_000,
        mean=(0.2860,) * 3,
        std=(0.3530,) * 3,
        hub="zalando-datasets/fashion_mnist",
        folder="/usr/share/datasets/fashion-mnist",
        names=_FASHION,
        notes="Debian's package dataset-fashion-mnist is used where it is installed",
    ),
    "notmnist": Entry(
        title="notMNIST (letters A to J)",
        classes=10,
        size=32,
        images=18_750,
        mean=_HALF,
        std=_HALF,
        hub="anubhavmaity/notMNIST",
        names=tuple("ABCDEFGHIJ"),
        notes="the hand-cleaned part, 18,750 images",
    ),
    "svhn": Entry(
        title="Street View House Numbers",
        classes=10,
        size=32,
        images=99_289,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        hub="ufldl-stanford/svhn",
        config="cropped_digits",
        label_column="label",
        splits=("train", "test"),
        notes="without the 531,131 easier images of its third split, extra",
    ),
    "cifar10": Entry(
        title="CIFAR-10",
        classes=10,
        size=32,
        images=60_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        hub="uoft-cs/cifar10",
        image_column="img",
        label_column="label",
    ),
    "cifar100": Entry(
        title="CIFAR-100",
        classes=100,
        size=32,
        images=60_000,
        domains=20,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        hub="uoft-cs/cifar100",
        image_column="img",
        label_column="fine_label",
        domain_column="coarse_label",
        notes="the 20 superclasses are its domains",
    ),
    "tiny-imagenet": Entry(
        title="Tiny-ImageNet",
        classes=200,
        size=64,
        images=110_000,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2302, 0.2265, 0.2262),
        hub="zh-plus/tiny-imagenet",
        label_column="label",
        notes="classes are WordNet ids",
    ),
    "caltech101": Entry(
        title="Caltech-101",
        classes=101,
        size=224,
        images=8_677,
        hub="flwrlabs/caltech101",
        label_column="label",
        notes="without the background class",
    ),
    "dtd": Entry(
        title="Describable Textures", classes=47, size=224, images=5_640, hub="tanganke/dtd", label_column="label"
    ),
    "eurosat": Entry(
        title="EuroSAT, RGB",
        classes=10,
        size=64,
        images=27_000,
        hub="blanchon/EuroSAT_RGB",
        label_column="label",
    ),
    "fgvc-aircraft": Entry(
        title="FGVC-Aircraft, variants",
        classes=100,
        size=224,
        images=10_000,
        hub="HuggingFaceM4/FGVC-Aircraft",
        label_column="variant",
        notes="dataset.label_column=family or manufacturer gives coarser classes",
    ),
    "food101": Entry(title="Food-101", classes=101, size=224, images=101_000, hub="ethz/food101", label_column="label"),
    "flowers102": Entry(
        title="Oxford Flowers-102",
        classes=102,
        size=224,
        images=8_189,
        hub="dpdl-benchmark/oxford_flowers102",
        label_column="label",
    ),
    "oxford-pets": Entry(
        title="Oxford-IIIT Pets", classes=37, size=224, images=7_349, hub="timm/oxford-iiit-pet", label_column="label"
    ),
    "stanford-cars": Entry(
        title="Stanford Cars", classes=196, size=224, images=16_185, hub="tanganke/stanford_cars", label_column="label"
    ),
    "ucf101": Entry(
        title="UCF-101, middle frames",
        classes=101,
        size=224,
        images=13_320,
        manual="get the UCF-101 videos, save the middle frame of each, " + _LAY_OUT + " class/*.jpg",
    ),
    "office-caltech10": Entry(
        title="Office-Caltech10",
        classes=10,
        size=224,
        images=2_533,
        domains=4,
        manual="get the images of the 10 classes that Office-31 and Caltech-256 share, "
        + _LAY_OUT
        + " domain/class/*.jpg with the domains amazon, caltech, dslr and webcam",
    ),
    "domainnet": Entry(
        title="DomainNet",
        classes=345,
        size=224,
        images=586_575,
        domains=6,
        hub="wltjr1007/DomainNet",
        label_column="label",
        domain_column="domain",
        notes="six domains, 586,575 images: the cache takes 88 GB at this size",
    ),
    "domainnet-10": Entry(
        title="DomainNet, the 10 classes of federated studies",
        classes=10,
        size=224,
        domains=6,
        hub="wltjr1007/DomainNet",
        label_column="label",
        domain_column="domain",
        keep=_DOMAINNET_10,
    ),
    "ham10000": Entry(
        title="HAM10000, skin lesions",
        classes=7,
        size=224,
        hub="marmal88/skin_cancer",
        image_column="image",
        label_column="dx",
        splits=("train",),
        notes="its validation and test splits repeat images of train and are left out",
    ),
    "msk": Entry(
        title="MSK, skin lesions of the ISIC archive (Dermoscopic-FL)",
        classes=2,
        size=224,
        manual="get the MSK collections from the ISIC archive with their diagnoses, "
        + _LAY_OUT
        + " class/*.jpg, or client/{train,test}/class/*.jpg together with other collections as clients",
    ),
    "dermoscopic-fl": Entry(
        title="Dermoscopic-FL: four sites of HAM10000 and MSK, three lesions",
        classes=3,
        size=224,
        images=10_490,
        domains=4,
        manual="get HAM10000 and the MSK collections with their diagnoses, "
        + _LAY_OUT
        + " client/{train,test}/class/*.jpg",
    ),
    "five-dataset": Entry(
        title="SVHN, CIFAR-10, notMNIST, Fashion-MNIST and MNIST as one",
        classes=50,
        size=224,
        images=318_039,
        domains=5,
        manual="save the images of the five datasets, "
        + _LAY_OUT
        + " domain/class/*.png with fifty different class names",
    ),
    "shapes": Entry(
        title="Drawn shapes in eight styles",
        classes=16,
        size=32,
        images=9_600,
        domains=8,
        mean=_HALF,
        std=_HALF,
        notes="drawn in seconds: 9,600 images, the styles are domains; clip-mini was trained on five of them",
    ),
}

"""Writes the seeds of the fuzz corpus: small files of every kind and rarity. usage: make_corpus.py FOLDER (with the tests' Python)"""
import io
import struct
import sys
from pathlib import Path

import edfio
import numpy as np
import safetensors.numpy
import tifffile
from PIL import Image

OUT = Path(sys.argv[1])


def write(target, name, content):
    folder = OUT / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def saved(save):
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


rng = np.random.default_rng(0)
for dtype in ("|b1", "|u1", "<i2", ">i4", "<f2", ">f4", "<f8", "<i8"):
    a = rng.integers(0, 2, (2, 2, 3)).astype(dtype)
    write("npy", dtype[1:] + ("b" if dtype[0] == ">" else ""), saved(lambda f: np.save(f, a)))
write("npy", "fortran", saved(lambda f: np.save(f, np.asfortranarray(a.astype("f4")))))
write("npy", "structured", saved(lambda f: np.save(f, np.zeros(2, [("a", "f4"), ("b", "i2")]))))
x, y = np.arange(12, dtype="i2").reshape(2, 2, 3), np.array([0, 1])
write("npz", "stored", saved(lambda f: np.savez(f, x=x, y=y)))
write("npz", "packed", saved(lambda f: np.savez_compressed(f, x=np.asfortranarray(x), y=y)))

# Four entries for one piece of deflated bytes, together more than the file.
packed = saved(lambda f: np.savez_compressed(f, x=np.random.default_rng(0).integers(0, 256, 1000, "u1")))
at, end = packed.rindex(b"PK\x01\x02"), packed.rindex(b"PK\x05\x06")
tail = bytearray(packed[end:])
tail[8:12] = (4).to_bytes(2, "little") * 2
tail[12:16] = (4 * (end - at)).to_bytes(4, "little")
write("npz", "overlap", packed[:at] + b"".join(packed[at:end].replace(b"x.npy", name) for name in (b"x.npy", b"a.npy", b"b.npy", b"c.npy")) + tail)


def edf(cls, signal, discontinuous=False):
    marks = [edfio.EdfAnnotation(0.5, None, "blink"), edfio.EdfAnnotation(1, 0.5, "d\u00e9but")]
    signals = [signal(rng.normal(0, 50, 192), 64, label="EEG Fp1-Ref", physical_dimension="uV"), signal(rng.normal(0, 5, 96), 32, label="C3", physical_dimension="mV")]
    file = saved(lambda f: cls(signals, annotations=marks).write(f))
    return file.replace(b"F+C", b"F+D", 1) if discontinuous else file


write("edf", "edf_plus", edf(edfio.Edf, edfio.EdfSignal))
write("edf", "edf_d", edf(edfio.Edf, edfio.EdfSignal, True))
write("edf", "bdf", edf(edfio.Bdf, edfio.BdfSignal))
plain = saved(lambda f: edfio.Edf([edfio.EdfSignal(rng.normal(0, 50, 300), 100, label="a")]).write(f))
write("edf", "plain", plain)
write("edf", "fast", plain[:244] + b"0.000002" + plain[252:])   # a record of 2 us
write("ts", "labels", b"@problemName x\n@classLabel true a b\n@data\n1,2.5,-3e-1:4,+5,6:b\n7,8,9:1e-50,11,12:a\n")
write("ts", "missing", b"@timestamps false\n@classLabel false\n@data\n1,?,3,4\nNaN,2\n")

rgb = Image.fromarray((rng.random((24, 40, 3)) * 255).astype("u1"))
smooth = Image.fromarray(np.fromfunction(lambda h, w, c: (h * 5 + w * 3 + c * 40) % 256, (24, 40, 3)).astype("u1"))
exif = Image.Exif()
exif[0x0112] = 6
write("jpeg", "rgb", saved(lambda f: smooth.save(f, "jpeg", quality=80)))
write("jpeg", "turned", saved(lambda f: smooth.save(f, "jpeg", quality=50, exif=exif)))
write("jpeg", "progressive", saved(lambda f: smooth.save(f, "jpeg", progressive=True)))
write("jpeg", "cmyk", saved(lambda f: smooth.convert("CMYK").save(f, "jpeg")))
write("jpeg", "gray", saved(lambda f: smooth.convert("L").save(f, "jpeg")))
write("png", "rgb", saved(lambda f: smooth.save(f, "png")))
write("png", "alpha16", saved(lambda f: Image.fromarray((rng.random((9, 11)) * 65535).astype("u2")).save(f, "png")))
write("png", "palette", saved(lambda f: smooth.quantize(16).save(f, "png")))
write("png", "rgba", saved(lambda f: smooth.convert("RGBA").save(f, "png")))
write("webp", "lossy", saved(lambda f: smooth.save(f, "webp", quality=60)))
write("webp", "lossless", saved(lambda f: smooth.save(f, "webp", lossless=True)))
write("webp", "alpha", saved(lambda f: smooth.convert("RGBA").save(f, "webp")))
for name, dtype, more in (("strips", "u1", {}), ("apart", "u1", dict(planarconfig="separate")), ("tiles16", "u2", dict(tile=(16, 16), compression="zlib")), ("lzw", "u1", {})):
    a = rng.integers(0, 255, (20, 24, 3)).astype(dtype)
    stored = np.moveaxis(a, -1, 0) if "planarconfig" in more else a
    write("tiff", name, saved(lambda f: tifffile.imwrite(f, stored, photometric="rgb", **more)) if name != "lzw" else saved(lambda f: smooth.save(f, "tiff", compression="tiff_lzw")))
write("tiff", "palette", saved(lambda f: smooth.quantize(16).save(f, "tiff")))
write("tiff", "jpeg", saved(lambda f: smooth.save(f, "tiff", compression="jpeg")))

write("safetensors", "two", safetensors.numpy.save({"a": np.zeros((2, 2), "f4"), "b": np.ones(3, "f2")}, {"format": "pt"}))
write("safetensors", "scalar", safetensors.numpy.save({"a": np.float32(1).reshape(()), "empty": np.zeros(0, "f4")}))
header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
write("safetensors", "lies", struct.pack("<Q", 1 << 62) + header + bytes(4))
root = Path(__file__).resolve().parents[2]
for name in ("quickstart", "quickstart_images"):
    write("job_yaml", name, (root / "configs" / f"{name}.yaml").read_bytes())
write("job_yaml", "edf", b"name: a\ndata: {source: edf, path: /x, channels: [Fp1, 'T7|T3'], band_pass: [0.5, 0], notch: [50]}\nschedule: {epochs: 1}\n")
write("job_yaml", "odd", b"name: &a x\n? [a, b]\n: !!str 1\n<<: *a\nname: b\nmodel: {input_size: [1, 2, 3, 4]}\n---\n- \"\\xff\"\n")
